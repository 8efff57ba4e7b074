"""Traces of single requests, in Triton's files or sent to a collector of OpenTelemetry's.

``Tracing`` (``tracing.py``) has the settings and says which requests are traced; ``trace.py`` records what happens to
them; ``files.py`` and ``opentelemetry/`` take what was recorded.  Everything runs on the event loop, but files are
written, and spans are sent, in threads.
"""
