"""The checks of ``conch check``: they read and compare a repository's files, and run no model code."""
