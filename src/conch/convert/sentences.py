"""The texts that variants of a model are compared on: built in, or from a file of the user's.

Random token ids would not do: activations on them are unlike those on language, and so are the errors of a
quantised network.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from conch.errors import invalid
from conch.sampling import TEXT_GENERATION
from conch.texts import builtin

#: Tasks whose input is two texts, and the columns of a file that may hold each.
_PAIRS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "question-answering": (("question",), ("context",)),
    "text-ranking": (("query", "question", "text", "text_input"), ("passage", "document", "context", "text_pair")),
    "zero-shot-classification": (("text", "premise", "sentence", "text_input"), ("hypothesis", "text_pair")),
}
_TEXT: Final = ("text", "sentence", "text_input", "sentence1", "content")
_HYPOTHESES: Final = tuple(
    f"This example is about {topic}." for topic in ("sports", "politics", "cooking", "technology", "health", "travel")
)
#: Passages that a built-in question is ranked against; the first answers it.
_PASSAGES: Final = 6
#: A file may be larger than anybody wants to wait for; this many of its texts, spread evenly, are used.
MAX_SAMPLES: Final = 512
#: Samples are not divided into parts with fewer than these.
MIN_SAMPLES: Final = 8


@dataclass(frozen=True, slots=True)
class TextSample:
    """One input: a text, and for tasks over pairs the second text.

    Samples of one ``group`` are ranked against each other; ``label`` is the right answer if a file has it, else empty.
    """

    text: str
    pair: str | None = None
    group: int = 0
    label: str = ""


def load(task: str, file: Path | None = None, *, mask: str = "") -> list[TextSample]:
    """The samples for a task of ``transformers.pipeline``; ``mask`` is the tokenizer's mask token, for fill-mask.

    Raises INVALID_ARG for a file that cannot be read, or lacks what the task needs.
    """
    samples = _spread(_from_file(task, file)) if file is not None else _built_in(task)
    if task == "fill-mask":
        if not mask:
            raise invalid("fill-mask needs a tokenizer with a mask token")
        samples = list(_masked(samples, mask))
        if not samples:
            raise invalid(f"no text of {file} has a word to mask: each needs four words, or the mask token {mask}")
    return samples


def split(samples: Sequence[TextSample]) -> tuple[list[TextSample], list[TextSample]]:
    """Samples to calibrate a quantised network with, and others to compare it on.

    A third is for calibration, and no group is in both parts: a network would otherwise be judged on what it was fitted
    to.  Too few to divide serve for both.
    """
    grouped = any(sample.group for sample in samples)
    fitted: list[TextSample] = []
    compared: list[TextSample] = []
    for index, sample in enumerate(samples):
        (fitted if (sample.group if grouped else index) % 3 == 1 else compared).append(sample)
    if min(len(fitted), len(compared)) < MIN_SAMPLES:
        return list(samples), list(samples)
    return fitted, compared


def _built_in(task: str) -> list[TextSample]:
    if task == TEXT_GENERATION:
        return [
            TextSample(text) for text in (*builtin.passages(), *(document.context for document in builtin.documents()))
        ]
    sentences = builtin.sentences()
    if task not in _PAIRS:
        return [TextSample(sentence) for sentence in sentences]
    if task == "zero-shot-classification":
        return [TextSample(text, _HYPOTHESES[index % len(_HYPOTHESES)]) for index, text in enumerate(sentences)]
    documents = builtin.documents()
    if task == "question-answering":
        return [
            TextSample(question, document.context, group)
            for group, document in enumerate(documents)
            for question in document.questions
        ]
    questions = [(question, place) for place, document in enumerate(documents) for question in document.questions]
    return [
        TextSample(question, documents[(place + step) % len(documents)].context, group)
        for group, (question, place) in enumerate(questions)
        for step in range(_PASSAGES)
    ]


def label_indices(samples: Sequence[TextSample], names: Sequence[str] | None) -> list[int] | None:
    """The class of each sample by the labels of a file, which are names or numbers; None without labels.

    Raises INVALID_ARG for one that the model does not have.
    """
    if not all(sample.label for sample in samples):
        return None
    names = names or ()
    indices = {name: index for index, name in enumerate(names)} | {str(index): index for index in range(len(names))}
    for sample in samples:
        if sample.label not in indices:
            raise invalid(f"--data has the label '{sample.label}'; the model has {', '.join(names) or 'none'}")
    return [indices[sample.label] for sample in samples]


def _from_file(task: str, file: Path) -> list[TextSample]:
    try:
        rows = list(_rows(file))
    except OSError as error:
        raise invalid(f"--data {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise invalid(f"--data {file} is not UTF-8: byte {error.start}") from None
    if not rows:
        raise invalid(f"--data {file} has no texts")
    texts, pairs = _PAIRS.get(task, (_TEXT, ()))
    first = _column(file, task, rows[0], texts)
    second = _column(file, task, rows[0], pairs) if pairs else None
    groups: dict[str, int] = {}
    samples = []
    for row in rows:
        text = _cell(row, first)
        pair = _cell(row, second) if second else None
        if text.strip() and (pair is None or pair.strip()):
            label = _cell(row, "label")
            samples.append(TextSample(text, pair, groups.setdefault(text, len(groups)) if pairs else 0, label))
    if not samples:
        raise invalid(f"--data {file} has no texts in column '{first}'")
    return samples


def _rows(file: Path) -> Iterator[Mapping[str, Any]]:
    """A mapping for each line or record; a line of plain text is the column ``text``."""
    with file.open(encoding="utf-8-sig", newline="") as lines:
        if file.suffix in (".csv", ".tsv"):
            yield from csv.DictReader(lines, delimiter="\t" if file.suffix == ".tsv" else ",")
            return
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if not text:
                continue
            if file.suffix not in (".jsonl", ".json", ".ndjson"):
                yield {"text": text}
                continue
            try:
                value = json.loads(text)
            except ValueError as error:
                raise invalid(f"--data {file}, line {number}: not one JSON value a line: {error}") from None
            if not isinstance(value, dict | str):
                raise invalid(f"--data {file}, line {number}: neither an object nor a string")
            yield value if isinstance(value, dict) else {"text": value}


def _column(file: Path, task: str, row: Mapping[str, Any], names: Sequence[str]) -> str:
    for name in names:
        if name in row:
            return name
    choice = f"'{names[0]}'" if len(names) == 1 else f"one of {', '.join(names)}"
    raise invalid(f"--data {file}: {task} needs a column {choice}; it has {', '.join(map(str, row))}")


def _cell(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    return "" if value is None else str(value)


def _spread(samples: list[TextSample]) -> list[TextSample]:
    if len(samples) <= MAX_SAMPLES:
        return samples
    step = len(samples) / MAX_SAMPLES
    return [samples[int(index * step)] for index in range(MAX_SAMPLES)]


def _masked(samples: Sequence[TextSample], mask: str) -> Iterator[TextSample]:
    """Each text with one word masked, at another place in each; texts that have the mask already stay as they are."""
    for index, sample in enumerate(samples):
        words = sample.text.split()
        if mask in sample.text:
            yield sample
        elif len(words) >= 4:
            place = index * 7 % len(words)
            word = words[place]
            end = word[len(word.rstrip(".,;:!?")) :]
            yield TextSample(" ".join([*words[:place], mask + end, *words[place + 1 :]]))
