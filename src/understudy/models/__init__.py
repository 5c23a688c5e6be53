"""What a target is made of: its shape, its weights, and where they come from."""
