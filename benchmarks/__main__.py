"""``python -m benchmarks [QUESTION] [OPTION ...]``: one of ``QUESTIONS``, or without a name all ``COMPARISONS``."""

import sys
from importlib import import_module

COMPARISONS = ("serving", "huggingface", "generation")
QUESTIONS = (*COMPARISONS, "layers", "direct", "offline", "inside")

named = sys.argv[1:2] if sys.argv[1:2] and sys.argv[1] in QUESTIONS else []
sys.argv[1:] = sys.argv[1 + len(named) :]
for question in named or COMPARISONS:
    import_module(f"benchmarks.{question}").main()
