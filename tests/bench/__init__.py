"""What is asked when an engine is measured."""
