"""The machine of a measurement: its hardware, and interference by other processes.

``conch convert`` and ``conch perf`` both use it, each in its own process.
"""
