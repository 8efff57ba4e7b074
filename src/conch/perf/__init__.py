"""Measures a server of any make: ``conch perf``."""
