"""The machine that something is measured on: what it is, and what others do with it meanwhile.

``conch convert`` and ``conch perf`` look at it by the same rules, each in its own process.
"""
