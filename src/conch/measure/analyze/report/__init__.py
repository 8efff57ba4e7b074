"""Reports of an ``Analysis``: terminal output, CSV, JSON and HTML."""
