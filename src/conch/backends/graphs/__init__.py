"""Backends that run exported graphs: tensors in, tensors out."""
