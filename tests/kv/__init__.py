"""Blocks, prefixes and the caches of sequences."""
