"""Search strategies: which candidate is measured next, and at which load."""
