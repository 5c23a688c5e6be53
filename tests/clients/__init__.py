"""Other people's clients, unchanged, against a real server. `make test-clients` runs it."""
