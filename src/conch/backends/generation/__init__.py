"""Text generation with continuous batching: requests join and leave the running batch at every decoding step."""
