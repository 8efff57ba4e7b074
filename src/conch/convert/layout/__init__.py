"""The model directories that a conversion ends in, written into a folder that nobody loads yet."""
