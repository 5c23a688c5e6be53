"""A race is fair, shows what happened, and breaks no terminal."""
