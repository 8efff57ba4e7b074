"""Tokenizers of checkpoints: convert texts and conversations to token ids, and token ids to text."""
