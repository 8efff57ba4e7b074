"""GGUF files: their metadata and tensors, and the configuration and tokenizer that these amount to."""
