"""Drafts that learn from a target's own answers: collect, train, evaluate, export."""
