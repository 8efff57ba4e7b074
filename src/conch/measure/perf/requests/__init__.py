"""Encodes samples into requests, before the measurement begins. Pure."""
