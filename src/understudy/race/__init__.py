"""Plain against speculative decoding on the same prompts, live: what runs, how it is counted and what is shown."""
