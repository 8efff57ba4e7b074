"""Hugging Face checkpoints: location, configuration, verification and tokenizers.

Used in workers and in ``conch convert``.
"""
