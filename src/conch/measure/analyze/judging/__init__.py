"""The goals of an analysis, and the figures, scores and ranking of the measured configurations. Pure."""
