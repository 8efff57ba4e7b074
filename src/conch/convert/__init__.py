"""``conch convert``: a checkpoint to variants that are measured and compared with it, and a verdict.

Imported by the command alone.  ``variants`` builds the files (``export`` to ONNX, ``optimise`` and ``quantise``
them, ``openvino``); the other modules measure, compare and write the folder that is served.
``causal`` and what begins with its name are the same for language models.
"""
