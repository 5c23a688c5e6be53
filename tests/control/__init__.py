"""Pure functions from measured numbers to decisions."""
