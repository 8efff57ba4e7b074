"""Measuring tools: ``conch perf``, ``conch analyze``, their reports, and the built-in texts for requests.

They use servers as clients do.
"""
