"""Tasks of encoder models: from text to vectors, classes, spans or tokens."""
