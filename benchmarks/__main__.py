"""``python -m benchmarks [serving|huggingface|generation] [OPTION ...]``: one question, or all in turn."""

import sys
from importlib import import_module

QUESTIONS = ("serving", "huggingface", "generation")

named = sys.argv[1:2] if sys.argv[1:2] and sys.argv[1] in QUESTIONS else []
sys.argv[1:] = sys.argv[1 + len(named) :]
for question in named or QUESTIONS:
    import_module(f"benchmarks.{question}").main()
