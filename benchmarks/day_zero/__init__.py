"""Compares conch with transformers for every architecture, with tiny random checkpoints."""
