"""The server's metadata, statistics, metrics and resource usage around the measured windows."""
