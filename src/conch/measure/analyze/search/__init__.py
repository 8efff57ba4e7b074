"""The search space of configurations, and the strategies that explore it. Pure."""
