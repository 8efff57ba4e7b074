"""conch as a library: servers inside the caller's process, and clients with the same calls.

``conch/__init__.py`` exports from here, and imports these modules when their names are first used.
"""
