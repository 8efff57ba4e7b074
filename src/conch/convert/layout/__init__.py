"""Writes the model directories of a conversion to a folder that no server loads yet."""
