"""Text-to-text tasks of encoder-decoder models: summarization, translation, text2text-generation.

Requests are tokenised on arrival. Requests with equal parameters are grouped by length and run together in
transformers' ``generate``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from time import monotonic_ns, process_time
from typing import Any, Final, Protocol

from conch.backends.base.arrays import Request, Result, Strings
from conch.backends.base.verification import SLOW_STEP, VERIFIED_TOKENS, require_greedy_likeness, tie_of
from conch.backends.tasks.encoders.encoder_task import Sharing
from conch.backends.tasks.task import (
    ExecutionWork,
    OpenEngine,
    PreparedRequest,
    Task,
    TaskDescription,
    library_failure,
)
from conch.backends.tasks.transformers import (
    DEFAULT_NEW_TOKENS,
    device_of,
    generation_arguments,
    generation_inputs,
    load_model,
    load_tokenizer,
    stop_when_cancelled,
)
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.tokenizers.inputs import too_short_error
from conch.core.errors import ConchError, invalid
from conch.core.inference import TensorSpec
from conch.core.lengths import equal_runs

#: Keys of a checkpoint's ``task_specific_params`` that are not arguments of ``generate``.
_NOT_GENERATION = frozenset({"prefix"})


class Languages(Protocol):
    """The interface that converts the inputs ``src_lang`` and ``tgt_lang`` to arguments of ``generate``."""

    def choose(self, source: str | None, target: str | None) -> tuple[str, Mapping[str, Any]]:
        """Return the prefix of the text and arguments of ``generate``. Raises INVALID_ARG for an unknown language.

        The caller must hold the tokenizer's lock until the text is tokenised.
        """


class TaskParameters:
    """Languages of checkpoints with ``task_specific_params``, such as T5 and Bart: a prefix and parameters by task.

    A task such as ``translation_en_to_de`` defines a language pair.
    """

    def __init__(self, config: Mapping[str, Any], task: str) -> None:
        table = config.get("task_specific_params") or {}
        self._pairs = {
            tuple(name.removeprefix("translation_").split("_to_", 1)): parameters
            for name, parameters in table.items()
            if name.startswith("translation_") and "_to_" in name
        }
        self._default = table.get(task) or {}

    def choose(self, source: str | None, target: str | None) -> tuple[str, Mapping[str, Any]]:
        parameters = self._default
        if source is not None or target is not None:
            known = [pair for pair in self._pairs if pair[0] == (source or pair[0]) and pair[1] == (target or pair[1])]
            if len(known) != 1:
                pairs = ", ".join(f"{source} to {target}" for source, target in self._pairs) or "none"
                raise invalid(
                    f"inputs 'src_lang' and 'tgt_lang' are '{source or ''}' and '{target or ''}'; "
                    f"the pairs that this model supports are: {pairs}"
                )
            parameters = self._pairs[known[0]]
        generation = {name: value for name, value in parameters.items() if name not in _NOT_GENERATION}
        return parameters.get("prefix") or "", generation


class LanguageTokens:
    """Languages of tokenizers that have a token per language, such as those of mBART, M2M100 and NLLB."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        codes = getattr(tokenizer, "lang_code_to_id", None) or getattr(tokenizer, "fairseq_language_codes", None)
        self._codes = sorted(codes or ())
        self._source = self._own(tokenizer.src_lang)
        self._target = self._own(getattr(tokenizer, "tgt_lang", None))

    @staticmethod
    def fits(tokenizer: Any) -> bool:
        """Whether the tokenizer has language tokens."""
        return hasattr(tokenizer, "src_lang") and hasattr(tokenizer, "set_src_lang_special_tokens")

    def choose(self, source: str | None, target: str | None) -> tuple[str, Mapping[str, Any]]:
        source, target = source or self._source, target or self._target
        forced = {} if target is None else {"forced_bos_token_id": self._token(target, "tgt_lang")}
        if source is not None:
            self._token(source, "src_lang")
            if self._tokenizer.src_lang != source:
                self._tokenizer.src_lang = source
        return "", forced

    def _own(self, language: str | None) -> str | None:
        """Return the tokenizer's default ``language``, or None if the vocabulary lacks it."""
        if language is None:
            return None
        try:
            self._token(language, "tgt_lang")
        except ConchError:
            return None
        return language

    def _token(self, language: str, name: str) -> int:
        if self._codes and language not in self._codes:
            raise self._unknown(language, name)
        if hasattr(self._tokenizer, "get_lang_id"):
            return int(self._tokenizer.get_lang_id(language))
        token = self._tokenizer.convert_tokens_to_ids(language)
        if token is None or token == self._tokenizer.unk_token_id:
            raise self._unknown(language, name)
        return int(token)

    def _unknown(self, language: str, name: str) -> Exception:
        some = ", ".join(self._codes[:20]) + (" ..." if len(self._codes) > 20 else "")
        supported = f"; supported are {some}" if some else ""
        return invalid(f"input '{name}' is '{language}', which this model does not support{supported}")


def languages_of(tokenizer: Any, config: Mapping[str, Any], task: str) -> Languages:
    """Return the language selection of a checkpoint: by tokens if its tokenizer has them, else by task parameters."""
    if LanguageTokens.fits(tokenizer):
        return LanguageTokens(tokenizer)
    return TaskParameters(config, task)


_logger = logging.getLogger(__name__)

#: A text, another of about the same length, and a longer one; their lengths in tokens depend on the tokenizer.
EXAMPLES: Final = (
    "Where is the nearest library?",
    "There is the oldest station!",
    "A program takes a list of numbers and returns the even ones, while the bus to the station is late.",
)
#: Greedy generation of one sequence; overrides generation_config.json.
_GREEDY: Final[Mapping[str, Any]] = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1}


def examine(model: Any, examples: Sequence[list[int]], pad: int) -> Sharing:
    """Determine which texts may share a run without changing their logits; ``pad`` is the id of the padding token."""
    [short, *_, long] = sorted(examples, key=len)
    # A text of the same length: the tokens of the short text in another order, except the last.
    other = [*short[-2::-1], short[-1]]
    expected = _first_logits(model, [short], pad)
    tolerance = tie_of(model)

    def holds(texts: Sequence[list[int]]) -> bool:
        try:
            logits = _first_logits(model, texts, pad)
        except Exception:  # networks that accept only one text or one length raise many types
            return False
        size = expected[expected.isfinite()].abs().max().clamp(min=1e-6)
        apart = (expected - logits).where(expected != logits, 0.0).abs().max()
        return bool(apart <= tolerance * size)

    if not holds([short, other]):
        return Sharing.ALONE
    return Sharing.PADDED if holds([short, long]) else Sharing.EQUAL


def _first_logits(model: Any, texts: Sequence[list[int]], pad: int) -> Any:
    """Return the logits ``[vocabulary]`` of the first generated token of the first text."""
    import torch

    with torch.inference_mode():
        output = model.generate(
            **_padded(texts, pad, model.device), max_new_tokens=1, return_dict_in_generate=True, output_logits=True,
            **_GREEDY,
        )  # fmt: skip
    return output.logits[0][0].float()


def _padded(texts: Sequence[Sequence[int]], pad: int, device: Any) -> dict[str, Any]:
    """Pad token sequences on the right with the token ``pad``; returns ``input_ids`` and ``attention_mask``."""
    import torch

    longest = max(map(len, texts))
    ids = [[*text, *[pad] * (longest - len(text))] for text in texts]
    mask = [[1] * len(text) + [0] * (longest - len(text)) for text in texts]
    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}


def verify(task: Text2Text, model: Any, examples: Sequence[list[int]]) -> None:
    """Compare greedy outputs of ``task`` for ``examples`` (token ids) with those of transformers for each text alone.

    Raises INVALID_ARG if an output differs. Skips the comparison if a step takes longer than ``SLOW_STEP``.
    """
    import torch

    generation = {**_GREEDY, "max_new_tokens": VERIFIED_TOKENS}
    completions: dict[int, list[int]] = {}
    before = process_time()
    for run in task.runs([len(ids) for ids in examples]):
        completions.update(zip(run, task.write([examples[index] for index in run], generation), strict=True))
    if process_time() - before > SLOW_STEP * VERIFIED_TOKENS * torch.get_num_threads():
        _logger.info("not compared with transformers: a step takes more than %s s on each core", SLOW_STEP)
        return
    require_greedy_likeness(
        model,
        examples,
        [completions[index] for index in range(len(examples))],
        lambda text: f"for a text of {len(text)} tokens among {len(examples)}",
        num_beams=1,
        num_return_sequences=1,
    )


#: The default maximum of tokens in a batch, including padding; each generated token attends to all tokens of its row.
BATCH_TOKENS: Final = 8192

#: The tensors of all checkpoints.
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
    """The token ids of each row, and the request's parameters of ``generate``."""

    __slots__ = ("generation", "ids", "truncated")

    def __init__(self, request: Request, ids: list[list[int]], generation: Mapping[str, Any], truncated: int) -> None:
        super().__init__(request, max(len(row) for row in ids), len(ids))
        self.ids = ids
        self.generation = generation
        self.truncated = truncated


@dataclass(slots=True)
class _Row:
    """A text of a batch: its request, and its row in that request."""

    prepared: PreparedTexts
    index: int

    @property
    def ids(self) -> list[int]:
        return self.prepared.ids[self.index]


class Text2Text(Task):
    """Input ``text_input`` STRING [1], output ``text_output`` STRING [1].

    The optional inputs are the parameters of ``generate`` and, for multilingual models, ``src_lang`` and ``tgt_lang``.
    Defaults come from the checkpoint: ``generation_config.json``, and the entry of its task in
    ``task_specific_params``, which includes the prefix of T5.
    """

    def __init__(self, checkpoint: Checkpoint, open_engine: OpenEngine) -> None:
        self._device = device_of(open_engine)
        self._tokenizer = load_tokenizer(checkpoint)
        self._max_length = checkpoint.options.max_length or checkpoint.max_length
        special = self._tokenizer.num_special_tokens_to_add()
        if self._max_length <= special:
            raise too_short_error(self._max_length, special)
        self._model = load_model("AutoModelForSeq2SeqLM", checkpoint, self._device)
        if not self._model.config.is_encoder_decoder:
            raise invalid(
                f"task '{checkpoint.task}' needs an encoder-decoder, which {type(self._model).__name__} of "
                f"'{checkpoint.source}' is not"
            )
        self._languages = languages_of(self._tokenizer, checkpoint.config, checkpoint.task)
        #: Protects the tokenizer, which keeps languages and truncation as state.
        self._lock = Lock()
        self._refuse = checkpoint.refuses_long_texts
        self._batch_tokens = checkpoint.options.max_batch_tokens or BATCH_TOKENS
        #: The maximum number of generated tokens, given by the learned positions; 0 means no limit.
        self._most_tokens = int(checkpoint.config.get("max_position_embeddings") or 0)
        self._pad = next(
            token
            for token in (self._tokenizer.pad_token_id, getattr(self._model.config, "pad_token_id", None), 0)
            if token is not None
        )
        examples = [ids[: self._max_length] for ids in self._tokenizer(list(EXAMPLES))["input_ids"] if ids]
        self._sharing = examine(self._model, examples, self._pad)
        if checkpoint.options.verify_on_load:
            verify(self, self._model, examples)

    @classmethod
    def describe(cls, checkpoint: Checkpoint) -> TaskDescription:
        return DESCRIPTION

    def prepare(self, request: Request) -> PreparedTexts:
        """Tokenise the texts. Raises INVALID_ARG for a text that is not UTF-8, is too long, or has no tokens."""
        texts = request.texts("text_input")
        requested = generation_arguments(request, most_tokens=self._most_tokens)
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
                raise invalid(f"input 'text_input' has no tokens in row {row}; the model needs at least one")
        return PreparedTexts(request, encoded, self._parameters(requested, implied), len(long))

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
                    # Incompatible parameters, or not enough memory for this batch.
                    failed = library_failure("generation", error)
                    for row in batch_rows:
                        written[id(row.prepared)] = failed
                    continue
                for row, text in zip(batch_rows, texts, strict=True):
                    outcome = written[id(row.prepared)]
                    if isinstance(outcome, dict):
                        outcome[row.index] = text
        return [self._result(prepared, written[id(prepared)]) for prepared in batch]

    def _parameters(self, requested: Mapping[str, Any], implied: Mapping[str, Any]) -> dict[str, Any]:
        """Merge the task's arguments with the request's; a length limit in the request replaces the task's limits."""
        limits = ("max_new_tokens", "max_length")
        parameters = dict(implied)
        if any(name in requested for name in limits):
            parameters = {name: value for name, value in parameters.items() if name not in limits}
        parameters.update(requested)
        saved = self._model.generation_config.to_diff_dict()
        if not any(name in parameters or name in saved for name in limits):
            parameters["max_new_tokens"] = min(
                DEFAULT_NEW_TOKENS, self._most_tokens - 1 if self._most_tokens else 1 << 16
            )
        return parameters

    def runs(self, lengths: Sequence[int]) -> list[list[int]]:
        """Divide texts of these lengths (tokens) into runs; returns the indices of each run's texts, longest first."""
        if self._sharing is not Sharing.PADDED:
            return equal_runs(lengths, budget=self._batch_tokens, limit=1 if self._sharing is Sharing.ALONE else 0)
        batches: list[list[int]] = []
        for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
            # The first text of a batch is its longest.
            if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= self._batch_tokens:
                batches[-1].append(index)
            else:
                batches.append([index])
        return batches

    def write(self, texts: Sequence[Sequence[int]], generation: Mapping[str, Any], **arguments: Any) -> list[list[int]]:
        """Generate tokens for ``texts`` (token ids) in one run, including the start token.

        ``generation`` has the request's parameters of ``generate``, ``arguments`` further ones.
        """
        import torch

        with torch.inference_mode():
            written: list[list[int]] = self._model.generate(
                **_padded(texts, self._pad, self._device), **arguments, **generation
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
    def _result(prepared: PreparedRequest, outcome: dict[int, str] | ConchError) -> Result | ConchError:
        assert isinstance(prepared, PreparedTexts)
        if isinstance(outcome, ConchError):
            return outcome
        texts = [outcome[row] for row in range(prepared.sequence_count)]
        return Result(
            {"text_output": Strings((prepared.sequence_count, 1), texts)},
            {"truncated": prepared.truncated} if prepared.truncated else {},
        )
