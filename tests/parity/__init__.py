"""The proof, proven: it must pass what is right and fail what is broken or empty."""
