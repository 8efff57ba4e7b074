"""Traces of single requests, written to Triton's trace files or sent to an OpenTelemetry collector.

``Tracing`` (``tracing.py``) holds the settings and selects the requests to trace; ``trace.py`` records their events;
``TraceFile`` and ``collector.py`` receive the traces. Everything runs on the event loop, except that files are written
and spans are sent in threads.
"""
