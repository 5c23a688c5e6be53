"""The kernels: bit for bit equal to themselves, and close to their slow twins."""
