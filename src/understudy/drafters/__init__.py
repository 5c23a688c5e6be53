"""What proposes tokens ahead. Nothing a drafter does can change a word; it changes how many come from one pass."""
