"""Conversion of causal language models."""
