"""The backend ``huggingface`` for every task but text generation: requests in, a checkpoint's answers out.

``encoders/``, ``text2text/``, ``speech.py`` and ``vision.py`` have the tasks, ``pipelines/`` those that go through
transformers' own pipelines; ``table.py`` says which class serves which.  ``engines/`` run the networks of encoders and
of image classification; the other tasks run transformers' models themselves.
"""
