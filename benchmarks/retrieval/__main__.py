"""Compares conch with other servers of embeddings, and its server with its engines alone, in one interleaved run.

    python -m benchmarks.retrieval --home FOLDER --prepare                        # once, ahead of time
    python -m benchmarks.retrieval --home FOLDER [--rounds 3] [--seconds 2] [--peers NAME ...] [--quick]

All servers run at the same time and are measured in turns, in rotating order. The engines alone run in this process,
with the code of the worker: they tokenise, compute and pool. Tables have medians over the rounds, and the smallest and
largest ratio within a round. Quote ratios only, from an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np

import conch
from benchmarks.generation.others import MOST, Others
from benchmarks.inside import repeat
from benchmarks.load import measure
from benchmarks.peers import environment
from benchmarks.retrieval import columns, models
from benchmarks.retrieval.columns import CONCH, LARGE, MINILM, PEERS, Column
from benchmarks.tables import markdown
from benchmarks.texts import SENTENCE, mixed, text, words
from conch.backends.tasks.task import ExecutionWork
from tests.retrieval_models import completed
from tests.task_requests import open_model
from tests.text_checkpoints import request

ALL_MODELS: Final = (*models.CONVERTED, "static")
#: Texts in a request of one connection.
BATCH: Final = 64
DOCUMENT_TOKENS: Final = 128


@dataclass
class Question:
    """A row of a table: a ``measurement`` of each name, in rotating order. ``unit`` is ``ms`` or ``texts/s``.

    The ratios are the figure of the first name over those of the others.
    """

    title: str
    unit: str
    measurements: dict[str, Callable[[float], float]]
    figures: dict[str, list[float]] = field(default_factory=dict)

    def ask(self, number: int, seconds: float) -> None:
        """Measure once under each name, in round ``number``."""
        names = list(self.measurements)
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            figure = self.measurements[name](seconds)
            self.figures.setdefault(name, []).append(figure)
            print(f"round {number + 1}: {self.title}: {name}: {figure:.4g} {self.unit}", file=sys.stderr)

    def row(self, names: Sequence[str]) -> list[str]:
        """Return the medians under ``names``, and the ratios of the first one and each other."""
        medians = [f"{statistics.median(self.figures[name]):.4g}" if name in self.figures else "" for name in names]
        return [self.title, self.unit, *medians, *(self._ratio(names[0], name) for name in names[1:])]

    def _ratio(self, name: str, other: str) -> str:
        if other not in self.figures:
            return ""
        ratios = [own / theirs for own, theirs in zip(self.figures[name], self.figures[other], strict=True)]
        return f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f}–{max(ratios):.2f})"


def table(questions: Sequence[Question], names: Sequence[str]) -> str:
    """Return the results of questions with the same names."""
    ratios = [f"/ {name}" for name in names[1:]]
    return markdown([["question", "figure", *names, *ratios], *(question.row(names) for question in questions)])


def compared(servers: Sequence[Column], texts: Sequence[str]) -> list[Question]:
    """Return the questions to all servers, over ``/v1/embeddings``."""

    def questions(model: str, callers: int, sent: Sequence[str], title: str) -> Question:
        def of(column: Column) -> Callable[[float], float]:
            def ask(seconds: float) -> float:
                load = measure(column.target(model), sent, callers, seconds=seconds)
                return load.median / 1000 if callers == 1 else load.throughput

            return ask

        able = [column for column in servers if model in column.served]
        unit = "ms" if callers == 1 else "texts/s"
        return Question(
            f"{title}, {callers} caller{'s' * (callers > 1)}", unit, {column.name: of(column) for column in able}
        )

    return [
        questions(MINILM, 1, [SENTENCE], "16 tokens"),
        questions(MINILM, 1, texts, "mixed"),
        questions(MINILM, 16, texts, "mixed"),
        questions(MINILM, 64, texts, "mixed"),
        questions(LARGE, 16, texts, "mixed, 1,024 dimensions"),
    ]


class Served:
    """conch's server: a client with one connection, and one for the routes of client APIs."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._client = conch.Client(f"http://{address}")
        self._connection = http.client.HTTPConnection(address)

    def infer(self, model: str, texts: Sequence[str]) -> None:
        self._client.infer(model, {"text_input": [[text] for text in texts]})

    def post(self, path: str, body: dict[str, Any]) -> None:
        self._connection.request("POST", path, json.dumps(body))
        response = self._connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise RuntimeError(content.decode(errors="replace"))


class Alone:
    """A model in this process, with the code that the worker runs."""

    def __init__(self, folder: Path) -> None:
        self._task = open_model(folder)

    def run(self, **inputs: Any) -> None:
        """Compute the result of one request: tokenise, compute, pool."""
        completed(self._task.execute([self._task.prepare(request(**inputs))], ExecutionWork()))


def beside_engine(served: Served, folders: dict[str, Path], texts: Sequence[str], count: int) -> list[Question]:
    """Return the questions to conch's server and the same engine alone; ``count`` documents are reranked."""
    alone = {name: Alone(folder) for name, folder in folders.items() if name != LARGE}
    short = cycle(texts)
    documents = [text(DOCUMENT_TOKENS - 13, flow) for flow in [cycle(words())] for _ in range(count)]
    body = {"model": "ranker", "query": SENTENCE, "documents": documents}

    def median(call: Callable[[], object]) -> Callable[[float], float]:
        return lambda seconds: repeat(call, seconds)[0]

    def per_second(call: Callable[[list[str]], object]) -> Callable[[float], float]:
        # Batches differ in length: the mean counts, not the median.
        def ask(seconds: float) -> float:
            return rate(lambda: call(list(islice(short, BATCH))), seconds) * BATCH

        return ask

    def bulk(title: str, model: str) -> Question:
        return Question(
            title,
            "texts/s",
            {
                "served": per_second(lambda sent: served.infer(model, sent)),
                "alone": per_second(lambda sent: alone[model].run(text_input=sent)),
            },
        )

    return [
        Question(
            "16 tokens, /v1/embeddings, 1 caller",
            "ms",
            {
                "served": median(lambda: served.post("/v1/embeddings", {"model": MINILM, "input": SENTENCE})),
                "alone": median(lambda: alone[MINILM].run(text_input=[SENTENCE])),
            },
        ),
        Question(
            f"/rerank, {count} documents of {DOCUMENT_TOKENS} tokens",
            "ms",
            {
                "served": median(lambda: served.post("/rerank", body)),
                "alone": median(lambda: alone["ranker"].run(text_input=[SENTENCE] * count, text_pair=documents)),
            },
        ),
        bulk(f"conch.Client, batches of {BATCH}", MINILM),
        bulk(f"conch.Client, batches of {BATCH}, SPLADE", "splade"),
        bulk(f"conch.Client, batches of {BATCH}, static", "static"),
    ]


def rate(call: Callable[[], object], seconds: float) -> float:
    """Return the calls per second, without the first call."""
    call()
    count, start = 0, perf_counter()
    while not count or perf_counter() < start + seconds:
        call()
        count += 1
    return count / (perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, metavar="FOLDER", help="keeps the models here; made anew without")
    parser.add_argument("--prepare", action="store_true", help="make the models and the peers' environments, and end")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one measurement")
    parser.add_argument("--texts", type=int, default=1024, help="of 5 to 256 tokens")
    parser.add_argument("--documents", type=int, default=100, help="that are reranked at once")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), metavar="NAME", help=", ".join(PEERS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures of all rounds")
    parser.add_argument("--quick", action="store_true", help="convert no model; the figures mean nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        home = options.home.resolve() if options.home else Path(temporary)
        home.mkdir(parents=True, exist_ok=True)
        make = models.source if options.quick else models.served
        folders = {name: make(home, name) for name in ALL_MODELS}
        for name in options.peers:
            columns.peer_folders(home, name)
            environment.python(PEERS[name])
        if options.prepare:
            return
        repository = models.repository(Path(temporary) / "models", folders)
        with columns.start(home, repository, options.peers) as servers:
            others = compared(servers, mixed(options.texts))
            served = Served(servers[0].address)
            engine = beside_engine(served, folders, mixed(options.texts), options.documents)
            run(servers, others, engine, options.rounds, options.seconds)
    if options.json:
        options.json.write_text(
            json.dumps({question.title: question.figures for question in (*others, *engine)}, indent=1)
        )


def run(servers: list[Column], others: list[Question], engine: list[Question], rounds: int, seconds: float) -> None:
    """Ask all questions, to all servers and beside the engines; print the tables and the load of the machine."""
    if servers[1:]:
        print(f"Smallest cosine with {CONCH} on 16 texts: {deviations(servers, mixed(16))}.\n")
    disturbed = []
    before = os.getloadavg()[0]
    for number in range(rounds):
        for question in (*others, *engine):
            interference = Others(lambda: [process for column in servers for process in column.tree()])
            question.ask(number, seconds)
            if (share := interference.share()) > MOST:
                disturbed.append(f"round {number + 1}: {question.title}: other programs had {share:.0%} of the machine")
    print(table(others, [column.name for column in servers]) + "\n")
    print(table(engine, ["served", "alone"]) + "\n")
    dense, sparse = (statistics.median(engine[index].figures["served"]) for index in (2, 3))
    print(f"A sparse vector costs {dense / sparse:.2f} times a dense one of the same encoder.")
    print(f"Load {before:.1f} before and {os.getloadavg()[0]:.1f} after.")
    if disturbed:
        print("\n- ".join([f"{len(disturbed)} measurements were disturbed:", *disturbed]))


def deviations(servers: Sequence[Column], texts: Sequence[str]) -> str:
    """Describe the difference of the servers' results; raises RuntimeError if one is of another model."""
    vectors = {column.name: np.stack([column.target(MINILM).embedding(text) for text in texts]) for column in servers}
    cosines = {name: float((vectors[CONCH] * own).sum(1).min()) for name, own in vectors.items() if name != CONCH}
    for name, cosine in cosines.items():
        if not cosine > 0.8:
            raise RuntimeError(f"{name} answers something else than {CONCH}: cosine {cosine:.3f}")
    return ", ".join(f"{name} {cosine:.4f}" for name, cosine in cosines.items())


if __name__ == "__main__":
    main()
