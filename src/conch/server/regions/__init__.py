"""Shared memory regions that clients register, and tensors in them."""
