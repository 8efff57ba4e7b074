"""Front ends: HTTP and gRPC servers that translate requests, and limits that both share."""
