"""Search strategies, which choose the next candidate and load to measure."""
