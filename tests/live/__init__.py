"""What a server must stand, shown on the embedded model through HTTP. `make test-live` runs it."""
