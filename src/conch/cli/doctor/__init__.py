"""``conch doctor``: facts about the machine and the environment, and advice based on them.

No large packages are imported: versions come from their metadata.
"""
