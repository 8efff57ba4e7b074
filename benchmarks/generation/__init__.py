"""Compares conch with other servers for text generation over HTTP (SmolLM2-135M-Instruct), in one interleaved run."""


def main() -> None:
    """Run ``python -m benchmarks.generation`` for ``python -m benchmarks generation``."""
    from benchmarks.generation.__main__ import main

    main()
