"""Built-in texts, and mixes of request shapes, for comparing and measuring models."""
