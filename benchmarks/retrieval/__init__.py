"""Compares conch with other servers of embeddings, and its server with its engines alone."""
