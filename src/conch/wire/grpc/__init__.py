"""The gRPC protocol: protobuf messages of requests and responses, both directions."""
