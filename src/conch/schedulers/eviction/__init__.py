"""Decides which models are loaded where not all fit (``--model-control-mode=on-demand``); pure, and takes the clock."""
