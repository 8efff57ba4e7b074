"""Tasks that go through transformers' own pipelines, row by row."""
