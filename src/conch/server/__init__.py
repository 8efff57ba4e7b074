"""The server behind the front ends: its models, and the schedulers and executors of their requests."""
