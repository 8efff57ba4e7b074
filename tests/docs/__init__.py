"""Runs what the pages of docs/ say: each command, each program, each file, as a reader would (see ``test_pages``)."""
