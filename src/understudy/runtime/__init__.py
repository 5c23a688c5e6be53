"""One forward pass: from sequences and drafts to rows, and from rows to logits."""
