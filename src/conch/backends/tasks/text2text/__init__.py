"""Encoder-decoder models from text to text: summarization, translation, text2text-generation."""
