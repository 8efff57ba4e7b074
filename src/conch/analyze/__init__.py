"""``conch analyze``: measures configurations of models, ranks them, and says which is best and why."""
