"""From what was noted to figures, and how sure they are.  Pure."""
