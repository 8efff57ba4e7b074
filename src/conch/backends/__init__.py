"""Backends, which run models in workers; the server imports only ``table``."""
