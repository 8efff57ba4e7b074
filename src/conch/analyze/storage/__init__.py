"""What an analysis keeps in files: its checkpoint, and its results."""
