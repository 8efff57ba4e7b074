"""Memory that clients share with the server: regions that they register, and tensors in them."""
