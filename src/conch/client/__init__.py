"""``conch.Client`` and its protocols: requests, results, and one client each for HTTP and gRPC."""
