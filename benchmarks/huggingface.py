"""Compares conch with other servers for text embeddings (all-MiniLM-L6-v2), in one interleaved run.

    python -m benchmarks.huggingface [--rounds 3] [--seconds 2] [--only uniform|mixed|offline|direct]
                                     [--peers NAME ...] [--variants NAME ...] [--converted FOLDER]

All servers run at the same time and are measured in turns, in rotating order. Tables have medians over the rounds, and
the smallest and largest ratio within a round. Quote ratios only, from an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks import converted, direct, offline
from benchmarks.columns import PEERS, Column, deviations, start
from benchmarks.offline import Offline
from benchmarks.questions import Question, mixed_questions, uniform_questions
from benchmarks.tables import absolute, ratios, share_of_offline

PARTS = ("uniform", "mixed", "offline", "direct")


def ask(questions: Sequence[Question], columns: Sequence[Column], rounds: int, seconds: float) -> None:
    """Ask every server each question that it supports, ``rounds`` times."""
    for number in range(rounds):
        turn = number % len(columns)
        for question in questions:
            for column in (*columns[turn:], *columns[:turn]):
                if question.fits(column):
                    figure = question.ask(column, seconds)
                    print(f"round {number + 1}: {question.title}: {column.name}: {figure:.0f}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one measurement")
    parser.add_argument("--only", choices=PARTS, help="one part of it")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), metavar="NAME", help=", ".join(PEERS))
    converted.add_arguments(parser)
    parser.add_argument("--max-batch", type=int, default=32, help="rows of a batch of the peers and of 'padding'")
    parser.add_argument("--texts", type=int, default=1024, help="of mixed lengths")
    options = parser.parse_args()
    parts = [options.only] if options.only else list(PARTS)

    with converted.folder(options.converted) as folder:
        variants = converted.chosen(folder, options.variants)
        peers = options.peers if {"uniform", "mixed"} & set(parts) else []
        questions: list[Question] = []
        if {"uniform", "offline"} & set(parts):
            questions += uniform_questions(only_full="uniform" not in parts)
        if {"mixed", "offline"} & set(parts):
            questions += mixed_questions(options.texts, only_full="mixed" not in parts)
        columns: list[Column] = []
        if questions:
            with start(folder, variants, peers, options.max_batch) as columns:
                print(deviations(columns))
                ask(questions, columns, options.rounds, options.seconds)
            print(absolute(questions, columns))
            print(ratios(questions, columns))
        offline_by_name: dict[str, Offline] = {}
        if {"offline", "direct"} & set(parts):
            offline_by_name = {name: offline.measure(folder, name, options.texts, options.seconds) for name in variants}
        if "offline" in parts:
            print(share_of_offline(questions, columns, offline_by_name))
        if "direct" in parts:
            for name in variants:
                print(f"One client, one text of 16 tokens, {name}:\n")
                print(direct.table(*direct.measure(folder, name, options.seconds)))
                steps = ", ".join(f"{step} {spent:.0f} µs" for step, spent in offline_by_name[name].steps.items())
                print(f"\nThe same steps repeated in one process: {steps}.\n")


if __name__ == "__main__":
    main()
