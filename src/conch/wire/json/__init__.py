"""The JSON protocol: bodies of HTTP requests and responses, both directions."""
