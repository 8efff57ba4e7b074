"""The questions that the demo asks the models, which answers are right, and printing them.

Called by the command once its server is ready.
"""

from __future__ import annotations

import time
from typing import Final

from rich.console import Console

from conch.cli.demo.client import DemoClient
from conch.core.errors import internal
from conch.measure.reports.report import Column, Row, Table
from conch.measure.reports.terminal import show

QUERY: Final = "How do I change my password?"
SENTENCES: Final = (
    "Login details are edited in the settings.",
    "The shop opens at nine on weekdays.",
    "Change trains at the central station.",
)
#: The one that answers QUERY, although it shares no word with it that matters.
CLOSEST: Final = 0
EMBEDDERS: Final = ("minilm", "minilm_ensemble")
#: How far apart two ways of computing one embedding may be.
TOLERANCE: Final = 1e-4

QUESTION: Final = "What is the capital of Japan?"
ANSWER: Final = "Tokyo"


def ask_embedders(client: DemoClient, console: Console) -> None:
    """Which sentence is closest to the query?  Raises INTERNAL when the models are wrong or differ."""
    embeddings = {model: client.embed(model, [QUERY, *SENTENCES]) for model in EMBEDDERS}
    cosines = {model: [dot(query, row) for row in rows] for model, (query, *rows) in embeddings.items()}

    columns = [Column("Sentence"), *(Column(model, True, "{:.4f}".format) for model in EMBEDDERS)]
    rows = [
        Row([sentence, *(cosines[model][index] for model in EMBEDDERS)], "good" if index == CLOSEST else "")
        for index, sentence in enumerate(SENTENCES)
    ]
    show(console, Table(f'Which sentence is closest to "{QUERY}"?', columns, rows))

    for model, values in cosines.items():
        if values.index(max(values)) != CLOSEST:
            raise internal(f"{model} finds the wrong sentence closest: {values}")
    first, other = (embeddings[model] for model in EMBEDDERS)
    differences = [abs(a - b) for x, y in zip(first, other, strict=True) for a, b in zip(x, y, strict=True)]
    if not all(difference <= TOLERANCE for difference in differences):  # so that NaN is an error too
        raise internal(f"{' and '.join(EMBEDDERS)} differ by {max(differences):.2g}, more than {TOLERANCE:g}")
    console.print(
        f"One model, or three that the server joins: they differ by {max(differences):.0e}.\n", highlight=False
    )


def ask_generator(client: DemoClient, console: Console) -> None:
    """Print an answer as it is written.  Raises INTERNAL when it is wrong."""
    console.print(f"[bold]smollm2: {QUESTION}[/bold]")
    start = time.perf_counter()
    first = start
    pieces: list[str] = []
    for piece in client.chat("smollm2", QUESTION, max_tokens=32):
        if not pieces:
            first = time.perf_counter()
        pieces.append(piece)
        console.print(piece, end="", markup=False, highlight=False)
    seconds = time.perf_counter() - start
    console.print(
        f"\n{len(pieces)} pieces in {seconds:.1f} s, the first after {first - start:.2f} s.\n", highlight=False
    )
    if ANSWER not in "".join(pieces):
        raise internal(f"smollm2 does not say {ANSWER!r} when asked {QUESTION!r}")


def dot(a: list[float], b: list[float]) -> float:
    """The cosine of two vectors of length 1."""
    return sum(x * y for x, y in zip(a, b, strict=True))
