"""What would have been: finished texts replayed with other drafters and depths, and when speculation pays at all."""
