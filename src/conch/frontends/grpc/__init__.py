"""The gRPC front end over ``conch.http2``: calls of the KServe service, health and reflection."""
