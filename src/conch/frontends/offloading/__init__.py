"""Decodes large requests and encodes large responses in separate processes.

A parser holds the interpreter lock while it runs, in any thread: seconds for tens of megabytes of JSON, during which
the server serves no other client. The front ends call ``pool.py`` on the event loop. ``program.py`` is the process; its
work (``decode.py``, ``encode.py``) is what front ends do themselves for small bodies. Both sides share ``documents.py``
and ``memory.py``.
"""
