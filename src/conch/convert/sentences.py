"""The texts for comparing variants of a model: built in, or from a user's file.

Random token ids are unsuitable: their activations differ from those of language, and so do the errors of a quantized
network.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from conch.core.errors import invalid
from conch.core.sampling import TEXT_GENERATION
from conch.measure.texts import builtin

#: Tasks with pairs of texts as input, and the names of file columns for each text.
_PAIRS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "question-answering": (("question",), ("context",)),
    "text-ranking": (("query", "question", "text", "text_input"), ("passage", "document", "context", "text_pair")),
    "zero-shot-classification": (("text", "premise", "sentence", "text_input"), ("hypothesis", "text_pair")),
}
_TEXT: Final = ("text", "sentence", "text_input", "sentence1", "content")
#: The same for queries and passages of embedding models.
_SEARCH: Final = (("query", "question", "anchor"), ("passage", "document", "context", "positive", "answer"))
#: The number of queries among the texts of a file without columns of queries.
_QUERIES: Final = 64
_SENTENCE_END: Final = re.compile(r"(?<=[.!?])\s+")
_HYPOTHESES: Final = tuple(
    f"This example is about {topic}." for topic in ("sports", "politics", "cooking", "technology", "health", "travel")
)
#: The number of passages against which a built-in question is ranked; the first answers it.
_PASSAGES: Final = 6
#: The maximum number of texts from a file, spread evenly, because more would take too long.
MAX_SAMPLES: Final = 512
#: The minimum size of both parts when samples are split.
MIN_SAMPLES: Final = 8


@dataclass(frozen=True, slots=True)
class TextSample:
    """One input: a text, and a second text for tasks with pairs.

    Samples of one ``group`` are ranked against each other; ``label`` is the correct label if a file has it, else empty.
    """

    text: str
    pair: str | None = None
    group: int = 0
    label: str = ""


def load(task: str, file: Path | None = None, *, mask: str = "") -> list[TextSample]:
    """Load the samples for a task of ``transformers.pipeline``; ``mask`` is the tokenizer's mask token, for fill-mask.

    Raises INVALID_ARG for a file that is unreadable or lacks columns that the task needs.
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
    """Split samples into those for calibrating a quantized network and those for comparing it.

    A third is for calibration. No group is in both parts, because a network would otherwise be judged on texts that it
    was fitted to. Too few samples to split are used for both.
    """
    grouped = any(sample.group for sample in samples)
    fitted: list[TextSample] = []
    compared: list[TextSample] = []
    for index, sample in enumerate(samples):
        (fitted if (sample.group if grouped else index) % 3 == 1 else compared).append(sample)
    if min(len(fitted), len(compared)) < MIN_SAMPLES:
        return list(samples), list(samples)
    return fitted, compared


@dataclass(frozen=True, slots=True)
class SearchTexts:
    """Queries, and passages to find for each of them."""

    queries: tuple[str, ...]
    passages: tuple[str, ...]


def search_texts(file: Path | None = None) -> tuple[SearchTexts, SearchTexts]:
    """Return the texts for calibrating a quantized embedding model, and those for comparing it.

    They are built in, or the rows of ``file`` with a query and a passage; of a file with one text per row, some texts
    are the queries for all others. Raises INVALID_ARG for a file that is unreadable or has no texts.
    """
    if file is None:
        documents = builtin.documents()
        queries = [
            TextSample(question, group=group)
            for group, document in enumerate(documents)
            for question in document.questions
        ]
        whole = [*builtin.passages(), *(document.context for document in documents)]
        pieces = [piece for text in whole for piece in _SENTENCE_END.split(text)]
        passages = [TextSample(text) for text in (*builtin.sentences(), *whole, *pieces)]
    else:
        rows = _samples(file, "feature-extraction", *_search_columns(file))
        passages = [TextSample(sample.pair or sample.text) for sample in rows]
        queries = [TextSample(sample.text) for sample in rows]
        if not any(sample.pair for sample in rows):
            queries = queries[:: max(1, len(queries) // _QUERIES)]
    (fitted, compared), (fitted_passages, compared_passages) = (
        split(_unique(queries)),
        split(_spread(_unique(passages))),
    )
    return SearchTexts(_texts(fitted), _texts(fitted_passages)), SearchTexts(
        _texts(compared), _texts(compared_passages)
    )


def _search_columns(file: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of columns with queries and passages, or with texts and no second one."""
    rows = read_rows(file)
    pairs = all(any(name in rows[0] for name in names) for names in _SEARCH)
    return _SEARCH if pairs else (_TEXT, ())


def _unique(samples: Sequence[TextSample]) -> list[TextSample]:
    return list({sample.text: sample for sample in samples}.values())


def _texts(samples: Sequence[TextSample]) -> tuple[str, ...]:
    return tuple(sample.text for sample in samples)


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
    questions = [(question, index) for index, document in enumerate(documents) for question in document.questions]
    return [
        TextSample(question, documents[(index + step) % len(documents)].context, group)
        for group, (question, index) in enumerate(questions)
        for step in range(_PASSAGES)
    ]


def label_indices(samples: Sequence[TextSample], names: Sequence[str] | None) -> list[int] | None:
    """Return the class index of each sample's label, which is a name or a number; None without labels.

    Raises INVALID_ARG for a label that the model does not have.
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
    return _samples(file, task, *_PAIRS.get(task, (_TEXT, ())))


def read_rows(file: Path) -> list[Mapping[str, Any]]:
    """Return the rows of a ``--data`` file by column. Raises INVALID_ARG for an unreadable or empty file."""
    try:
        rows = list(_rows(file))
    except OSError as error:
        raise invalid(f"--data {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise invalid(f"--data {file} is not UTF-8: byte {error.start}") from None
    except csv.Error as error:
        raise invalid(f"--data {file} cannot be read as CSV: {error}") from None
    if not rows:
        raise invalid(f"--data {file} has no texts")
    return rows


def _samples(file: Path, task: str, texts: Sequence[str], pairs: Sequence[str]) -> list[TextSample]:
    """Return the samples of a file, from the first of the columns ``texts`` and the first of ``pairs``."""
    rows = read_rows(file)
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
    """Yield a mapping per line or record; a line of plain text has the column ``text``."""
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
            except (ValueError, RecursionError) as error:
                raise invalid(f"--data {file}, line {number}: expected one JSON value per line: {error}") from None
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
    """Yield each text with one word masked, at varying positions; texts with a mask are unchanged."""
    for index, sample in enumerate(samples):
        words = sample.text.split()
        if mask in sample.text:
            yield sample
        elif len(words) >= 4:
            position = index * 7 % len(words)
            word = words[position]
            end = word[len(word.rstrip(".,;:!?")) :]
            yield TextSample(" ".join([*words[:position], mask + end, *words[position + 1 :]]))
