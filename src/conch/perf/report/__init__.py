"""Writers of reports: the terminal, CSV and JSON."""
