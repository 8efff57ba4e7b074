"""Writers of what an analysis found: the terminal, CSV and JSON, pages and documents; all from one ``Analysis``."""
