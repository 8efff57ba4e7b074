"""Tokenizers of checkpoints: texts and conversations to token ids, and token ids to text."""
