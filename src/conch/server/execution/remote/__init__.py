"""Remote models, which other servers run: endpoint selection, transports and health checks."""
