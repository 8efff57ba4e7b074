"""The files of an analysis: its journal and its results."""
