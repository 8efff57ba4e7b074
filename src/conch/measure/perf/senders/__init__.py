"""The processes that send requests: load generation, connections and the records of requests."""
