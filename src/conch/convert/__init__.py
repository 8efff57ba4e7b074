"""``conch convert``: from a checkpoint to variants that are compared with it and measured, and a verdict on each.

Imported by the command alone.  ``run`` takes the steps; ``encoder`` and ``causal`` are the two kinds of models that it
takes them for, ``layout`` the folders that are written, ``report`` what people read.
"""
