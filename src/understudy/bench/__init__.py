"""What is asked of an engine when it is measured, and how the measurement is told."""
