"""The backend ``pytorch``: a TorchScript file or a ``torch.export`` program, tensors in and tensors out."""
