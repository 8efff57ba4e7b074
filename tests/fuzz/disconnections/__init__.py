"""Clients that disconnect, cancel and stall at random moments, while models are reloaded and workers killed.

``make fuzz-disconnections`` keeps one server with models of all kinds busy. Afterwards nothing may be left of the
requests: all gauges are zero, each model responds as before, and each can be unloaded.
"""
