"""Between text and token ids: the tokenizer, chat templates, and text that arrives token by token."""
