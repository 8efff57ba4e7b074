"""Embeddings of texts: dense, sparse and multi-vector models, with the modules of sentence-transformers."""
