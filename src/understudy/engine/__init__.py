"""Continuous batching around one step: choose, draft, forward, verify, commit, observe."""
