"""Conversion of Whisper."""
