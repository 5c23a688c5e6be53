"""One file per command: its arguments, and what it does. `cli.py` is the frame around them."""
