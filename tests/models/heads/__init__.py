"""Tests of the networks of trained drafts."""
