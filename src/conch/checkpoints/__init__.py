"""Checkpoints of Hugging Face models: where their files are, what they say, and their tokenizers.

Used in workers and in ``conch convert``.
"""
