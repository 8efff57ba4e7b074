"""The conversion of causal language models."""
