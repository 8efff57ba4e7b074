"""Translation between the vocabulary and what clients send: no I/O, no event loop."""
