"""What clients of text generation send and get: the tensors of each of Triton's backends for language models."""
