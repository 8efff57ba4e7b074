"""Pages and documents with charts, in one look: for ``conch perf``, ``conch analyze`` and ``conch convert``."""
