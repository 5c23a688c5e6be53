"""What the HTTP process and the engine process say to each other: typed messages in frames, nothing that runs."""
