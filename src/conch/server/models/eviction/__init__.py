"""Decides which models are loaded if not all fit (``--model-control-mode=on-demand``); pure, times are passed in."""
