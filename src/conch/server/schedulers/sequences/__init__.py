"""Sequence batching: the requests of a sequence run on the same instance, in order, one at a time."""
