"""conch serves Hugging Face models the Triton way.  Importing this package imports nothing else."""

__version__ = "0.2.0.dev0"
