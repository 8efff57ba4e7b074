"""GGUF files: their metadata and tensors, and the configuration that these amount to."""
