"""Rows: from sequences and drafts to one pass of the target."""
