"""In-flight batching for libraries that only compute: schedules sequences, keeps prefixes, samples from logits."""
