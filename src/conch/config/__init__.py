"""The model configuration: reading, completing, checking and printing ``config.pbtxt``."""
