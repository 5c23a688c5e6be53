"""When to speculate, how deep, and why: pure decisions from measured numbers. No torch."""
