"""Conversion of encoders and other networks that compute a response in one pass."""
