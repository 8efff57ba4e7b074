"""Translates between requests or responses and their wire formats, without I/O or an event loop."""
