"""Tasks that run in transformers' own pipelines, row by row."""
