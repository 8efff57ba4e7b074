"""What the backends of conch's own have in common: one worker per model and device, a thread per instance."""
