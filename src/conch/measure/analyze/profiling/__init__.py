"""Serves and measures the candidates of each search."""
