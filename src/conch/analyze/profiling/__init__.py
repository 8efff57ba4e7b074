"""Serves and measures one candidate after the other, until the search has ended."""
