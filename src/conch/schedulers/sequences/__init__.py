"""Sequence batching: requests that belong together reach the same instance in order, one at a time."""
