"""Throws bytes at whatever reads what clients and repositories send, in one process and without sockets.

``targets/`` has the targets, each a function of bytes with the invariants that hold for any; ``test_targets.py`` runs
each for a moment from a fixed seed, ``python -m tests.fuzz`` (``make fuzz``) for as long as it is told, with atheris,
which is guided by coverage, where that is installed.
"""
