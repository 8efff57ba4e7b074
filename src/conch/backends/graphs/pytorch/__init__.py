"""The backend ``pytorch``: runs a TorchScript file or a ``torch.export`` program, tensors in, tensors out."""
