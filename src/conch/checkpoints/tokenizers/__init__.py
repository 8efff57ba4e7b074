"""Texts, conversations and token ids."""
