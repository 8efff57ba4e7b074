"""Whatever transformers has a pipeline for and no module of its own here: rows in, the pipeline's answers out."""
