"""What runs in a worker process, under a model's own interpreter (Python 3.9 and later) with numpy and nothing else."""
