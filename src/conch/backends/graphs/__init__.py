"""Backends for exported graphs: tensors in, tensors out."""
