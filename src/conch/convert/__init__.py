"""``conch convert``: converts a checkpoint to variants, compares them with it, measures and judges them.

Imported only by the command. ``run`` executes the steps; ``encoder`` and ``causal`` implement them for the two kinds
of models; ``layout`` writes the model directories, and ``report`` the reports.
"""
