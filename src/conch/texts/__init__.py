"""Built-in texts, and mixes of request shapes: what models are compared on and measured with."""
