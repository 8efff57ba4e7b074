"""Computes figures and their confidence from the records of requests. Pure."""
