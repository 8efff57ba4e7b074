"""The task ``question-answering``: finds the spans of a context that answer a question.

Runs in workers. Source: ``QuestionAnsweringPipeline`` of transformers 4 (removed in 5). Results are equal, except that
a word at the edge of a window stays whole here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from tokenizers import Encoding

from conch.backends.base.arrays import Array, Request, Result, Strings
from conch.backends.tasks.classification import checked_top_k
from conch.backends.tasks.encoders.encoder_task import EncodedRequest, EncoderTask, PaddedBatch, texts_of
from conch.backends.tasks.task import OpenEngine, TaskDescription
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.tokenizers.inputs import InputEncoder
from conch.checkpoints.tokenizers.tokenizer import CHUNK, Tokens
from conch.core.errors import invalid, unsupported
from conch.core.inference import TensorSpec


@dataclass(slots=True)
class AnswerSpan:
    """An answer: the characters of a context from ``start`` to ``end`` (exclusive)."""

    text: str
    score: float
    start: int
    end: int


@dataclass(slots=True)
class Window:
    """A question with a part of its context: one sequence for the network.

    Tokens from ``first`` to ``last`` (exclusive) belong to the context. Token ``index`` of the window is token ``index
    + shift`` of ``encoding``, which has the whole context. ``allowed`` marks the tokens that may begin or end a span.
    """

    tokens: Tokens
    encoding: Encoding
    first: int
    last: int
    shift: int
    allowed: Array


def windows(encoding: Encoding, length: int, stride: int, row: int, encoder: InputEncoder) -> list[Window]:
    """Divide a question and its context into windows of at most ``length`` tokens that overlap by ``stride`` tokens.

    ``encoding`` is the whole pair. Raises INVALID_ARG if the question leaves too few tokens for the context.
    """
    sequences = encoding.sequence_ids
    first = next((index for index, sequence in enumerate(sequences) if sequence == 1), -1)
    if first < 0:
        raise invalid(f"input 'context' has no tokens in row {row}; the model needs at least one")
    last = len(sequences) - sequences[::-1].index(1)
    ids = np.array(encoding.ids, np.int64)
    types = np.array(encoding.type_ids, np.int64) if encoder.types else None
    count = last - first
    room = min(length - (len(ids) - count), count)
    if room < 1 or (room < count and room <= stride):
        raise invalid(
            f"input 'question' leaves {max(room, 0)} of {length} tokens for the context in row {row}; "
            f"windows that overlap by doc_stride={stride} need more: shorten the question or set a smaller doc_stride"
        )
    # Networks point to their first token if the context has no answer.
    cls_id = encoder.tokenizer.special.cls_id
    start = ids == cls_id if cls_id is not None else np.zeros(len(ids), bool)
    row_windows: list[Window] = []
    for begin in range(0, count, room - stride if room < count else count):
        kept = np.r_[0:first, first + begin : first + min(begin + room, count), last : len(ids)]
        until = first + min(room, count - begin)
        allowed = start[kept]
        allowed[first:until] = True
        tokens = Tokens(ids[kept], None if types is None else types[kept])
        row_windows.append(Window(tokens, encoding, first, until, begin, allowed))
        if begin + room >= count:
            break
    return row_windows


def answers(
    context: str, read: Sequence[tuple[Window, Array, Array]], k: int, longest: int, *, empty: bool
) -> list[AnswerSpan]:
    """Return the ``k`` best answers, best first.

    ``read`` has the windows with their FP32 ``[length]`` start and end logits; ``longest`` is in tokens. Spans with the
    same text count as one answer, with the sum of their scores.
    """
    by_text: dict[str, AnswerSpan] = {}
    nothing = 1e6
    for window, start_logits, end_logits in read:
        start = _probabilities(start_logits, window.allowed)
        end = _probabilities(end_logits, window.allowed)
        nothing = min(nothing, float(start[0] * end[0]))
        start[0] = end[0] = 0.0
        # More than k, because several spans may cover the same words.
        for first, last, score in _spans(start, end, 2 * k + 10, longest, window.allowed):
            begin, stop = _characters(window, first, last)
            text = context[begin:stop]
            known = by_text.get(text.lower())
            if known is not None:
                known.score += score
            else:
                by_text[text.lower()] = AnswerSpan(text, score, begin, stop)
    candidates = list(by_text.values())
    if empty:
        candidates.append(AnswerSpan("", nothing, 0, 0))
    return sorted(candidates, key=lambda answer: answer.score, reverse=True)[:k]


def _probabilities(logits: Array, allowed: Array) -> Array:
    masked = np.where(allowed, logits, np.float32(-10000.0))
    powers = np.exp(masked - masked.max())
    return np.asarray(powers / powers.sum())


def _spans(start: Array, end: Array, k: int, longest: int, allowed: Array) -> list[tuple[int, int, float]]:
    """Return the ``k`` best spans of at most ``longest`` tokens: first token, last token and score."""
    scores = np.tril(np.triu(np.outer(start, end)), longest - 1).ravel()
    if len(scores) <= k:
        order = np.argsort(-scores)
    else:
        some = np.argpartition(-scores, k)[:k]
        order = some[np.argsort(-scores[some])]
    ones, twos = np.divmod(order, len(start))
    return [
        (first, last, score)
        for first, last, score in zip(ones.tolist(), twos.tolist(), scores[order].tolist(), strict=True)
        if allowed[first] and allowed[last]
    ]


def _characters(window: Window, first: int, last: int) -> tuple[int, int]:
    """Return the character range of the words from token ``first`` to token ``last``."""
    encoding: Any = window.encoding
    shift = window.shift
    first, last = (token + shift if token >= window.first else token for token in (first, last))
    begin_word, end_word = encoding.token_to_word(first), encoding.token_to_word(last)
    begin = encoding.word_to_chars(begin_word, 1) if begin_word is not None else None
    stop = encoding.word_to_chars(end_word, 1) if end_word is not None else None
    if begin is None or stop is None:
        return encoding.offsets[first][0], encoding.offsets[last][1]
    return begin[0], stop[1]


#: The default window in tokens.
WINDOW: Final = 384
MANY: Final = 10**6

#: The default and the minimum, in tokens, of the maximum answer length and of the overlap of windows.
_COUNTS: Final = {"max_answer_len": (15, 1), "doc_stride": (128, 0)}


class QuestionAnswering(EncoderTask):
    """Returns the ``top_k`` best answers of each row; reads a long context in overlapping windows.

    ``handle_impossible_answer`` allows the empty answer. Rows with fewer answers than other rows are padded with empty
    answers of score 0.
    """

    head = "AutoModelForQuestionAnswering"
    reads = ("start_logits", "end_logits")
    pair = True

    def __init__(self, checkpoint: Checkpoint, open_engine: OpenEngine) -> None:
        super().__init__(checkpoint, open_engine)
        if self.encoder.tokenizer.fast is None:
            raise unsupported(f"question-answering needs a tokenizer.json, and '{checkpoint.source}' has none")
        self.fast = self.encoder.tokenizer.fast
        special = self.encoder.max_length - self.encoder.room(pair=True)
        window = checkpoint.options.integer("max_seq_len", WINDOW)
        if window < special + 2:
            raise invalid(
                f"parameter 'max_seq_len' is {window}; a question with a context needs at least {special + 2}"
            )
        self.window = min(self.encoder.max_length, window)

    @classmethod
    def describe(cls, checkpoint: Checkpoint) -> TaskDescription:
        for name, (default, minimum) in _COUNTS.items():
            checked_count(name, checkpoint.options.integer(name, default), minimum)
        checkpoint.options.flag("handle_impossible_answer")
        return TaskDescription(
            (
                TensorSpec("question", "BYTES", (1,)),
                TensorSpec("context", "BYTES", (1,)),
                *(TensorSpec(name, "INT32", (1,), optional=True) for name in ("top_k", *_COUNTS)),
                TensorSpec("handle_impossible_answer", "BOOL", (1,), optional=True),
            ),
            (
                TensorSpec("answer", "BYTES", (-1,)),
                TensorSpec("score", "FP32", (-1,)),
                TensorSpec("start", "INT32", (-1,)),
                TensorSpec("end", "INT32", (-1,)),
            ),
        )

    def prepare(self, request: Request) -> EncodedRequest:
        questions = texts_of(request, "question")
        contexts = texts_of(request, "context")
        stride = self._count(request, "doc_stride", self.window // 2)
        empty = self.flag(request, "handle_impossible_answer")
        k = checked_top_k(self.option(request, "top_k", self.options.top_k or 1), MANY)
        longest = self._count(request, "max_answer_len")
        rows: list[list[Window]] = []
        pairs = list(zip(questions, contexts, strict=True))
        for start in range(0, len(pairs), CHUNK):
            for row, encoding in enumerate(self.fast.encode_batch(pairs[start : start + CHUNK]), start):
                if not contexts[row].strip() or not questions[row].strip():
                    name = "question" if contexts[row].strip() else "context"
                    raise invalid(f"input '{name}' is empty in row {row}")
                rows.append(windows(encoding, self.window, stride, row, self.encoder))
        sequences = [window.tokens for row_windows in rows for window in row_windows]
        return EncodedRequest(request, sequences, 0, (contexts, rows, k, longest, empty))

    def _count(self, request: Request, name: str, maximum: int = MANY) -> int:
        """Return a number of tokens: the request's input, else the parameter, else the default, at most ``maximum``."""
        default, minimum = _COUNTS[name]
        count = request.option(name) if request.has(name) else self.options.integer(name, min(default, maximum))
        return checked_count(name, count, minimum)

    def extract(self, outputs: Mapping[str, Array], batch: PaddedBatch) -> Iterable[Any]:
        return list(zip(batch.rows(outputs["start_logits"]), batch.rows(outputs["end_logits"]), strict=True))

    def assemble(self, encoded: EncodedRequest, values: list[Any]) -> Result:
        contexts, rows, k, longest, empty = encoded.state
        logits = iter(values)
        best_answers = [
            answers(context, [(window, *next(logits)) for window in row], k, longest, empty=empty)
            for context, row in zip(contexts, rows, strict=True)
        ]
        width = max(1, max(map(len, best_answers)))
        filled = [answer for row in best_answers for answer in row + [AnswerSpan("", 0.0, 0, 0)] * (width - len(row))]
        shape = (len(best_answers), width)
        return Result(
            {
                "answer": Strings(shape, [answer.text for answer in filled]),
                "score": np.array([answer.score for answer in filled], np.float32).reshape(shape),
                "start": np.array([answer.start for answer in filled], np.int32).reshape(shape),
                "end": np.array([answer.end for answer in filled], np.int32).reshape(shape),
            }
        )


def checked_count(name: str, value: int, minimum: int) -> int:
    """Return ``value``, a number of tokens. Raises INVALID_ARG if it is out of range."""
    if not minimum <= value <= MANY:
        raise invalid(f"{name} is {value}; it must be at least {minimum}")
    return int(value)
