"""The I/O format ``text``: text in, text out."""
