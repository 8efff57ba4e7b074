"""What is searched, and in which order: the space of configurations, and strategies to explore it.  Pure."""
