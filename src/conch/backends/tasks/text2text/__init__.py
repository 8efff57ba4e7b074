"""Text-to-text tasks of encoder-decoder models: summarization, translation, text2text-generation."""
