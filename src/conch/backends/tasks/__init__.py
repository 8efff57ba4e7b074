"""The backend ``huggingface`` for every task except text generation.

``encoders/``, ``text2text/``, ``speech.py`` and ``vision.py`` implement the tasks. ``pipelines/`` serves all other
tasks through transformers' own pipelines. ``TASKS`` in ``backend.py`` maps each task to its class. ``engines/`` runs
the networks of encoders and of image classification; the other tasks call transformers' models directly.
"""
