"""The processes that send requests: when each request starts, how it travels, and what is noted of it."""
