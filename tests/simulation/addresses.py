"""Addresses of a simulated network."""

#: The servers that run remote models.
ADDRESSES = (("remote1", 9000), ("remote2", 9000))
#: The Redis server that stores cached responses.
REDIS = ("redis", 6379)
