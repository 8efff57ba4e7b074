"""The servers that are measured: one that is started here, and one that runs already."""
