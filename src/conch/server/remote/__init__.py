"""Models that other servers run: which of them gets a request, how it travels there, and whether they are ready."""
