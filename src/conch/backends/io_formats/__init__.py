"""I/O formats of text generation: the tensor interfaces of Triton's backends for language models."""
