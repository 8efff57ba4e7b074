"""The base of conch's own backends: one worker per model and device, a thread per instance."""
