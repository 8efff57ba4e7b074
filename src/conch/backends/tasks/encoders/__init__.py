"""The tasks over encoders: text in, and vectors, classes, spans or tokens out."""
