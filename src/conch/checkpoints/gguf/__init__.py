"""GGUF files: metadata, tensors, and their conversion to a Hugging Face configuration."""
