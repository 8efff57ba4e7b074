"""Reports of measurements: terminal output, CSV, JSON and HTML."""
