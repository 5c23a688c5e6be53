"""The proof that speculation changes no word: the same prompts with and without it, compared bit for bit."""
