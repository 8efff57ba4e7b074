"""Model repositories on disk and in stores: their models, changes to them, and directories made of uploaded files."""
