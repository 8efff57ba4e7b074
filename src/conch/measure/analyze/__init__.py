"""``conch analyze``: measures configurations of models, ranks them, and explains which one is best."""
