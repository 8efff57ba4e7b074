"""HTTP/2 as gRPC needs it: frames, streams, flow control and limits.  Knows nothing of calls."""
