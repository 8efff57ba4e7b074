"""The options of an analysis, from the command line and from a file."""
