"""HTTP/2 for gRPC: frames, streams, flow control and limits, independent of calls."""
