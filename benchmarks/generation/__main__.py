"""Compares conch with other servers for text generation (SmolLM2-135M-Instruct), in one interleaved run.

    python -m benchmarks.generation [--rounds 3] [--seconds 15] [--only PART ...] [--peers NAME ...]
                                    [--conch gguf gguf:llamacpp folder PATH ...] [--engine NAME] [--quick] [--json FILE]

All servers are started, and all except the measured one are stopped (SIGSTOP); they are measured in turns, in rotating
order. Tables have medians over the rounds, and the smallest and largest ratio within a round. Quote ratios only, from
an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.generation import alone, tables, weights
from benchmarks.generation.client import drive
from benchmarks.generation.columns import CHECKPOINTS, PEERS, USUAL, Column, start
from benchmarks.generation.others import MOST, Others
from benchmarks.generation.questions import PARTS, Question, Scale, questions, seed
from benchmarks.generation.trace import SEED, Ask, Load, Prompts, words
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.checkpoints.tokenizers.open import open_tokenizer

Words = Sequence[tuple[str, int]]


def check(column: Column, known: Words) -> str:
    """Warm up a server and check that it generates the requested number of tokens; returns the start of its output."""
    sample = Ask("The capital of France is", 24)
    (first,) = drive(column.target, Load([sample], 1), counted=True)
    if first.counted not in (None, sample.tokens):
        raise RuntimeError(f"{column.name} generated {first.counted} tokens and not {sample.tokens}")
    if column.streams and len(first.times) < sample.tokens // 2:
        raise RuntimeError(f"{column.name} sent {sample.tokens} tokens in {len(first.times)} pieces")
    drive(column.target, Load(Prompts(known, SEED - 1).mixed(8, 10, 40, 8), 4))
    return " ".join(first.text.split())[:70]


class Rounds:
    """Measures every question on every server that supports it, and conch's engines alone."""

    def __init__(
        self, all_questions: Sequence[Question], columns: Sequence[Column], known: Words, parts: set[str]
    ) -> None:
        self.columns, self.known, self.parts = columns, known, parts
        #: The measurements made while other programs used the processor.
        self.spoilt: list[str] = []
        #: The question that is also measured with the engine alone.
        self.full = [question for question in all_questions if question.part == "throughput"][-1]
        self.asked = [
            question
            for question in all_questions
            if question.part in parts or (question is self.full and "alone" in parts)
        ]

    def run(self, number: int) -> None:
        """Run one round; the server that goes first rotates."""
        turn = number % len(self.columns)
        for question in self.asked:
            load = question.load(Prompts(self.known, seed(question, number)))
            for column in (*self.columns[turn:], *self.columns[:turn]):
                if self._concerns(question, column):
                    self._ask(number, question, column, load)

    def _concerns(self, question: Question, column: Column) -> bool:
        if question.part not in self.parts:
            return column.ours
        if not column.served:
            return question.part == "throughput"
        return (column.streams or not question.streams) and (column.schemas or not question.schemas)

    def _ask(self, number: int, question: Question, column: Column, load: Load) -> None:
        if not column.served:
            self._ask_alone(number, question, column, column.name, load)
            return
        column.go()
        others = Others(column.tree)
        try:
            records = drive(column.target, load)
        finally:
            column.stop()
        self._mind(others, question, column.name)
        self._keep(number, question, column.name, {figure.name: figure.of(records) for figure in question.figures})
        if question is self.full and column.ours and "alone" in self.parts:
            self._ask_alone(number, question, column, f"{column.name}, alone", load)

    def _ask_alone(self, number: int, question: Question, column: Column, name: str, load: Load) -> None:
        """Measure an engine without a server."""
        others = Others(tuple)
        throughput = alone.measure(column.checkpoint, column.engine, load)
        self._mind(others, question, name)
        self._keep(number, question, name, {"tokens/s": throughput})

    def _mind(self, others: Others, question: Question, column: str) -> None:
        """Report that other programs used the processor."""
        share = others.share()
        if share > MOST:
            self.spoilt.append(f"{question.title}: {column}: other programs had {share:.0%} of the machine")
            print(self.spoilt[-1], file=sys.stderr)

    def _keep(self, number: int, question: Question, column: str, figures: dict[str, float]) -> None:
        question.keep(column, figures)
        said = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        print(f"round {number + 1}: {question.title}: {column}: {said}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="3, with --quick 1")
    parser.add_argument("--seconds", type=float, help="length of a measurement, at least")
    parser.add_argument("--rate", type=float, help="arrivals a second")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(USUAL), metavar="NAME", help=", ".join(PEERS))
    parser.add_argument(
        "--conch",
        nargs="*",
        default=list(CHECKPOINTS),
        metavar="CHECKPOINT[:ENGINE]",
        help="gguf, folder, or the path of one; with an engine: gguf:llamacpp",
    )
    parser.add_argument("--engine", default="auto", help="of conch; what it chooses itself by default")
    parser.add_argument("--quick", action="store_true", help="see that everything works; the figures mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures of all rounds")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the servers' logs and repositories here")
    options = parser.parse_args()

    scale = Scale.quick() if options.quick else Scale()
    scale = replace(scale, seconds=options.seconds or scale.seconds, rate=options.rate or scale.rate)
    gguf = Options.from_values({"model": str(weights.gguf()), "task": "text-generation"})
    known = words(open_tokenizer(Checkpoint.open(Path.cwd(), gguf)).encode)
    all_questions = questions(scale)
    with contextlib.ExitStack() as stack:
        home = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        home.mkdir(parents=True, exist_ok=True)
        columns = stack.enter_context(start(options.conch, options.engine, options.peers, home))
        print(tables.servers(columns))
        for column in columns:
            if not column.served:
                continue
            column.go()
            print(f"- {column.name}: The capital of France is … {check(column, known)}")
            column.stop()
        rounds = Rounds(all_questions, columns, known, set(options.only))
        for number in range(options.rounds or (1 if options.quick else 3)):
            rounds.run(number)
    print("\n" + tables.absolute(rounds.asked, columns))
    print(tables.ratios(rounds.asked, columns))
    if "alone" in options.only:
        print(tables.shares(rounds.full, columns))
    if rounds.spoilt:
        print("\n- ".join([f"{len(rounds.spoilt)} measurements are spoilt:", *rounds.spoilt]))
    if options.json:
        options.json.write_text(json.dumps(tables.document(rounds.asked, columns, rounds.spoilt), indent=1))


if __name__ == "__main__":
    main()
