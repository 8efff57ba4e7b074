"""What ``conch doctor`` tells of the machine and the environment: facts, and advice that follows from them.

Nothing heavy is imported: versions come from packages' metadata.
"""
