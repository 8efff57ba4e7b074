"""The backend base, shared by the built-in backends: one worker per model and device, one thread per instance."""
