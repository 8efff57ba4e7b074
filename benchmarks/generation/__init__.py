"""Text generation over HTTP, SmolLM2-135M-Instruct: conch beside what people use today, in one interleaved run."""


def main() -> None:
    """``python -m benchmarks.generation``, for ``python -m benchmarks generation``."""
    from benchmarks.generation.__main__ import main

    main()
