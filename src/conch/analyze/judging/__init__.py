"""What is wanted of a configuration, and how good the measured ones are: figures, scores, the ranking.  Pure."""
