"""``conch perf``: measures the performance of any KServe v2 or OpenAI-compatible server."""
