"""Decodes large requests and encodes large responses in separate processes.

A parser holds the interpreter lock while it runs, in any thread: seconds for tens of megabytes of JSON, during which
the server serves no other client. Front ends call :meth:`~conch.frontends.offloading.offloader.Offloader.run` with a
function of ``work.py`` for every body: a small one is handled at once, a large one in a process. ``messages.py``
carries arguments and results between the processes. docs/decisions/0021 has the measurements.
"""
