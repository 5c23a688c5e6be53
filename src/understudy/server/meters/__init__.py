"""What is counted, by what it is counted from: speculation, requests, engine steps, and the state of a server."""
