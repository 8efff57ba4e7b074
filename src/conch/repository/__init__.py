"""Model repositories on disk: what is there, what changed, and directories made of uploaded files."""
