"""Running requests: workers, batches, sequences, ensembles, remote models, cache and rate limiter."""
