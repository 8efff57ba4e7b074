"""Schedulers: pure state machines that decide which requests run next, and when."""
