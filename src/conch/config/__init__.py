"""The model configuration: reads, completes, checks and prints ``config.pbtxt``."""
