"""The backend ``huggingface`` for every task except text generation.

``encoders/``, ``text2text.py``, ``speech.py`` and ``vision.py`` implement the tasks. ``pipeline.py`` serves all other
tasks through transformers' own pipelines. ``TASKS`` in ``huggingface_backend.py`` maps each task to its class.
``engines.py`` runs the networks of encoders and of image classification; the other tasks call transformers' models
directly.
"""
