"""Encoder-decoder models from text to text: summarization, translation, text2text-generation.

Requests are tokenised as they arrive; those with equal parameters are generated together, grouped by length,
by transformers' ``generate``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from time import monotonic_ns
from typing import Any, Final

from conch.backends.native.arrays import Request, Result, Strings
from conch.backends.tasks.base import (
    ExecutionWork,
    OpenEngine,
    PreparedRequest,
    Task,
    TaskDescription,
    library_failure,
)
from conch.backends.tasks.decoding import (
    DEFAULT_NEW_TOKENS,
    generation_arguments,
    generation_inputs,
    stop_when_cancelled,
)
from conch.backends.tasks.encoders.trial import Sharing
from conch.backends.tasks.loading import device_of, load_model, load_tokenizer
from conch.backends.tasks.text2text.languages import languages_of
from conch.backends.tasks.text2text.trial import EXAMPLES, examine, verify
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.checkpoints.tokenizers.inputs import no_room
from conch.errors import ConchError, invalid
from conch.inference import TensorSpec
from conch.lengths import equal_runs

#: Tokens of a batch with padding, where the configuration does not say; every one of them is attended to for each
#: token that is written.
BATCH_TOKENS: Final = 8192

#: The same for all checkpoints.
DESCRIPTION: Final = TaskDescription(
    (
        TensorSpec("text_input", "BYTES", (1,)),
        *generation_inputs(),
        TensorSpec("src_lang", "BYTES", (1,), optional=True),
        TensorSpec("tgt_lang", "BYTES", (1,), optional=True),
    ),
    (TensorSpec("text_output", "BYTES", (1,)),),
    max_batch_size=32,
)


class PreparedTexts(PreparedRequest):
    """Token ids of each row, and the parameters of ``generate`` that the request asks for."""

    __slots__ = ("generation", "ids", "truncated")

    def __init__(self, request: Request, ids: list[list[int]], generation: Mapping[str, Any], truncated: int) -> None:
        super().__init__(request, max(len(row) for row in ids), len(ids))
        self.ids = ids
        self.generation = generation
        self.truncated = truncated


@dataclass(slots=True)
class _Row:
    """One text of a batch: the request that it belongs to, and its row there."""

    prepared: PreparedTexts
    index: int

    @property
    def ids(self) -> list[int]:
        return self.prepared.ids[self.index]


class Text2Text(Task):
    """Input ``text_input`` STRING [1], output ``text_output`` STRING [1].

    The optional inputs are the parameters of ``generate`` and, for models of several languages, ``src_lang`` and
    ``tgt_lang``.  What the request leaves out is the checkpoint's: ``generation_config.json``, and for its task
    ``task_specific_params`` with the prefix that T5 wants.
    """

    def __init__(self, checkpoint: Checkpoint, options: Options, open_engine: OpenEngine) -> None:
        self._device = device_of(open_engine)
        self._tokenizer = load_tokenizer(checkpoint, options)
        self._max_length = options.max_length or checkpoint.max_length
        special = self._tokenizer.num_special_tokens_to_add()
        if self._max_length <= special:
            raise no_room(self._max_length, special)
        self._model = load_model("AutoModelForSeq2SeqLM", checkpoint, options, self._device)
        if not self._model.config.is_encoder_decoder:
            raise invalid(
                f"task '{checkpoint.task}' needs an encoder-decoder, which {type(self._model).__name__} of "
                f"'{checkpoint.source}' is not: it continues texts, and may read more than that"
            )
        self._languages = languages_of(self._tokenizer, checkpoint.config, checkpoint.task)
        #: Over the tokenizer, which keeps its languages and its truncation as state.
        self._lock = Lock()
        self._refuse = options.truncation == "refuse"
        self._batch_tokens = options.max_batch_tokens or BATCH_TOKENS
        #: The most tokens that can be written, as learned positions end there; 0 for any number.
        self._most_tokens = int(checkpoint.config.get("max_position_embeddings") or 0)
        self._pad = next(
            token
            for token in (self._tokenizer.pad_token_id, getattr(self._model.config, "pad_token_id", None), 0)
            if token is not None
        )
        examples = [ids[: self._max_length] for ids in self._tokenizer(list(EXAMPLES))["input_ids"] if ids]
        self._sharing = examine(self._model, examples, self._pad)
        if options.verify_on_load:
            verify(self, self._model, examples)

    @classmethod
    def describe(cls, checkpoint: Checkpoint, options: Options) -> TaskDescription:
        return DESCRIPTION

    def prepare(self, request: Request) -> PreparedTexts:
        """Tokenise.  Raises INVALID_ARG for text that is not UTF-8, too long, or gives no tokens."""
        texts = request.texts("text_input")
        given = generation_arguments(request, most_tokens=self._most_tokens)
        with self._lock:
            prefix, implied = self._languages.choose(request.option("src_lang"), request.option("tgt_lang"))
            encoded = self._tokenizer([prefix + text for text in texts])["input_ids"]
            long = [row for row, ids in enumerate(encoded) if len(ids) > self._max_length]
            if long and self._refuse:
                raise invalid(
                    f"input 'text_input' has {len(encoded[long[0]])} tokens in row {long[0]}; "
                    f"the model takes at most {self._max_length}"
                )
            for row in long:
                cut = self._tokenizer(prefix + texts[row], truncation=True, max_length=self._max_length)
                encoded[row] = cut["input_ids"]
        for row, ids in enumerate(encoded):
            if not ids:
                raise invalid(f"input 'text_input' gives no tokens in row {row}; the model needs one at least")
        return PreparedTexts(request, encoded, self._parameters(given, implied), len(long))

    def execute(self, batch: Sequence[PreparedRequest], work: ExecutionWork) -> list[Result | ConchError]:
        groups: dict[str, list[_Row]] = {}
        for prepared in batch:
            assert isinstance(prepared, PreparedTexts)
            rows = groups.setdefault(repr(sorted(prepared.generation.items())), [])
            rows.extend(_Row(prepared, index) for index in range(prepared.sequence_count))
        written: dict[int, dict[int, str] | ConchError] = {id(prepared): {} for prepared in batch}
        for rows in groups.values():
            for run in self.runs([len(row.ids) for row in rows]):
                batch_rows = [rows[index] for index in run]
                try:
                    texts = self._generate(batch_rows, work)
                except (ValueError, TypeError, RuntimeError, IndexError) as error:
                    # Parameters that do not go together, or no memory for this batch.
                    failed = library_failure("generation", error)
                    for row in batch_rows:
                        written[id(row.prepared)] = failed
                    continue
                for row, text in zip(batch_rows, texts, strict=True):
                    answers = written[id(row.prepared)]
                    if isinstance(answers, dict):
                        answers[row.index] = text
        return [self._result(prepared, written[id(prepared)]) for prepared in batch]

    def _parameters(self, given: Mapping[str, Any], implied: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a request over those of its task; a limit of length that it gives replaces all others."""
        limits = ("max_new_tokens", "max_length")
        parameters = dict(implied)
        if any(name in given for name in limits):
            parameters = {name: value for name, value in parameters.items() if name not in limits}
        parameters.update(given)
        saved = self._model.generation_config.to_diff_dict()
        if not any(name in parameters or name in saved for name in limits):
            parameters["max_new_tokens"] = min(
                DEFAULT_NEW_TOKENS, self._most_tokens - 1 if self._most_tokens else 1 << 16
            )
        return parameters

    def runs(self, lengths: Sequence[int]) -> list[list[int]]:
        """Which texts of these lengths (tokens) are generated together, by their indices, the longest first."""
        if self._sharing is not Sharing.PADDED:
            return equal_runs(lengths, budget=self._batch_tokens, limit=1 if self._sharing is Sharing.ALONE else 0)
        batches: list[list[int]] = []
        for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
            # The first of a batch is its longest.
            if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= self._batch_tokens:
                batches[-1].append(index)
            else:
                batches.append([index])
        return batches

    def write(self, texts: Sequence[Sequence[int]], generation: Mapping[str, Any], **arguments: Any) -> list[list[int]]:
        """The tokens that are written for ``texts`` (token ids) in one run, with the one that begins an answer.

        ``generation`` are the parameters of a request, ``arguments`` others of ``generate``.
        """
        import torch

        longest = max(map(len, texts))
        ids = torch.full((len(texts), longest), self._pad, dtype=torch.long)
        mask = torch.zeros((len(texts), longest), dtype=torch.long)
        for place, text in enumerate(texts):
            ids[place, : len(text)] = torch.tensor(text)
            mask[place, : len(text)] = 1
        with torch.inference_mode():
            written: list[list[int]] = self._model.generate(
                input_ids=ids.to(self._device), attention_mask=mask.to(self._device), **arguments, **generation
            ).tolist()
        return written

    def _generate(self, rows: list[_Row], work: ExecutionWork) -> list[str]:
        stop = stop_when_cancelled([row.prepared.request for row in rows])
        before = monotonic_ns()
        written = self.write([row.ids for row in rows], rows[0].prepared.generation, stopping_criteria=stop)
        work.engine_ns += monotonic_ns() - before
        work.add(sum(len(row.ids) for row in rows), len(rows) * max(len(row.ids) for row in rows), len(rows))
        with self._lock:
            texts: list[str] = self._tokenizer.batch_decode(written, skip_special_tokens=True)
        return texts

    @staticmethod
    def _result(prepared: PreparedRequest, answers: dict[int, str] | ConchError) -> Result | ConchError:
        assert isinstance(prepared, PreparedTexts)
        if isinstance(answers, ConchError):
            return answers
        texts = [answers[row] for row in range(prepared.sequence_count)]
        return Result(
            {"text_output": Strings((prepared.sequence_count, 1), texts)},
            {"truncated": prepared.truncated} if prepared.truncated else {},
        )
