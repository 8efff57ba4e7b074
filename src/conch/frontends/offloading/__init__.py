"""Decodes large requests and encodes large answers in processes of their own.

A parser holds the interpreter's lock for as long as it runs, in whatever thread: seconds for tens of megabytes of JSON,
in which nobody else is served.  ``pool.py`` is what the front ends call, on the event loop; ``program.py`` is the
process, whose work (``decode.py``, ``encode.py``) is what front ends do themselves for small bodies.  Both ends share
``documents.py`` and ``memory.py``.
"""
