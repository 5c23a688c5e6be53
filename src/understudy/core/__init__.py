"""Plain data that every other folder speaks in. Standard library only."""
