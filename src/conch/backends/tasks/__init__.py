"""The backend ``huggingface``: serves a checkpoint as it is, task by task, on one of several engines."""
