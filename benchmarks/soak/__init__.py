"""Chaos: whether every request ends, and with what, while all sorts of things go wrong.

``python -m benchmarks.soak [--minutes 30] [--seed N]`` keeps a server at its limit with requests whose right answer is
known, and breaks something every second or two: workers are killed, stopped and slowed, models loaded, unloaded and
replaced, clients vanish, descriptors and disk run out. It fails if a request has no answer, a wrong one, or an error
that nothing explains, or if memory grows.
"""
