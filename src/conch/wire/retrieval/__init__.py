"""The client APIs of retrieval: embeddings, reranking, scores, classes and tokens.

Each module but the shared ones (``models``, ``inputs``, ``plans``, ``pairs``) is one API and only translates: a request
body to inputs of a model, and the model's outputs to a response body.
"""
