"""Extractive question answering: from a question and a context to the part of the context that answers.

Source: ``QuestionAnsweringPipeline`` of transformers 4 (5 has none); see ``spans.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from conch.backends.native.arrays import Array, Request, Result, Strings
from conch.backends.tasks.base import OpenEngine, TaskDescription
from conch.backends.tasks.encoders.base import EncodedRequest, EncoderTask, texts_of
from conch.backends.tasks.encoders.batch import PaddedBatch
from conch.backends.tasks.encoders.spans import AnswerSpan, Window, answers, windows
from conch.backends.tasks.scores import checked_top_k
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.checkpoints.tokenizers.tokenizer import CHUNK
from conch.errors import invalid, unsupported
from conch.inference import TensorSpec

#: Tokens of one window, unless the configuration says otherwise.
WINDOW: Final = 384
MANY: Final = 10**6

#: Tokens of an answer, and those that two windows share: the default and the least value.
_COUNTS: Final = {"max_answer_len": (15, 1), "doc_stride": (128, 0)}


class QuestionAnswering(EncoderTask):
    """The ``top_k`` best answers of each row; a context longer than a window is read in windows that overlap.

    ``handle_impossible_answer`` allows the empty answer.  Rows with fewer answers than asked for are filled up with
    empty ones of score 0.
    """

    head = "AutoModelForQuestionAnswering"
    reads = ("start_logits", "end_logits")
    pair = True

    def __init__(self, checkpoint: Checkpoint, options: Options, open_engine: OpenEngine) -> None:
        super().__init__(checkpoint, options, open_engine)
        if self.encoder.tokenizer.fast is None:
            raise unsupported(f"question-answering needs a tokenizer.json, and '{checkpoint.source}' has none")
        self.fast = self.encoder.tokenizer.fast
        special = self.encoder.max_length - self.encoder.room(pair=True)
        window = options.integer("max_seq_len", WINDOW)
        if window < special + 2:
            raise invalid(
                f"parameter 'max_seq_len' is {window}; a question with a context needs {special + 2} at least"
            )
        self.window = min(self.encoder.max_length, window)

    @classmethod
    def describe(cls, checkpoint: Checkpoint, options: Options) -> TaskDescription:
        for name, (default, least) in _COUNTS.items():
            checked_count(name, options.integer(name, default), least)
        options.flag("handle_impossible_answer")
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

    def _count(self, request: Request, name: str, most: int = MANY) -> int:
        """A number of tokens from a request, else from the parameters, else the default, at most ``most``."""
        default, least = _COUNTS[name]
        given = request.option(name) if request.has(name) else self.options.integer(name, min(default, most))
        return checked_count(name, given, least)

    def extract(self, outputs: Mapping[str, Array], batch: PaddedBatch) -> Iterable[Any]:
        return list(zip(batch.rows(outputs["start_logits"]), batch.rows(outputs["end_logits"]), strict=True))

    def assemble(self, encoded: EncodedRequest, values: list[Any]) -> Result:
        contexts, rows, k, longest, empty = encoded.state
        logits = iter(values)
        found = [
            answers(context, [(window, *next(logits)) for window in row], k, longest, empty=empty)
            for context, row in zip(contexts, rows, strict=True)
        ]
        width = max(1, max(map(len, found)))
        filled = [answer for row in found for answer in row + [AnswerSpan("", 0.0, 0, 0)] * (width - len(row))]
        shape = (len(found), width)
        return Result(
            {
                "answer": Strings(shape, [answer.text for answer in filled]),
                "score": np.array([answer.score for answer in filled], np.float32).reshape(shape),
                "start": np.array([answer.start for answer in filled], np.int32).reshape(shape),
                "end": np.array([answer.end for answer in filled], np.int32).reshape(shape),
            }
        )


def checked_count(name: str, value: int, least: int) -> int:
    """``value``, a number of tokens that a client or a configuration gave.  Raises INVALID_ARG out of range."""
    if not least <= value <= MANY:
        raise invalid(f"{name} is {value}; it must be at least {least}")
    return int(value)
