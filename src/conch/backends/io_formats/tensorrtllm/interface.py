"""Reads the input tensors of requests for backend ``tensorrtllm``. Used by the threads that read frames."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Request
from conch.backends.generation.limits import Limits
from conch.backends.generation.overrides import SamplingOverrides
from conch.backends.generation.request_state import ResponseBuilder
from conch.backends.io_formats.tensorrtllm.responses import (
    RequestRow,
    StopResponseBuilder,
    StopWords,
    TokenOutputOptions,
    TokenResponseBuilder,
)
from conch.backends.io_formats.tensorrtllm.tensors import VALUES, refuse_unsupported
from conch.core.errors import invalid
from conch.core.sampling.parameters import MAX_BAD_WORDS, MAX_STOPS, SamplingParams
from conch.core.sampling.structures import GUIDE_TYPES, Structure, structure_of

#: Kinds of structured output by the in-flight batcher's name; ``json`` without a schema allows any object.
_GUIDES: Final = {"json": "json", **{guide: kind for kind, guide in GUIDE_TYPES.items()}}


class _Rows:
    """The rows of a request. An input has one value per row, or one value for all rows."""

    def __init__(self, request: Request) -> None:
        self.request = request
        ids = request.array("input_ids")
        self.count = int(np.prod(ids.shape[:-1])) if ids.ndim else 0
        if not self.count:
            raise invalid("input 'input_ids' has no rows")
        self._ids = ids.reshape(self.count, -1)
        self._values: dict[str, list[Any]] = {}
        self._lengths = self.values("input_lengths") or [self._ids.shape[1]] * self.count

    def values(self, name: str) -> list[Any]:
        """Return the values of an input, one per row; empty if the input is absent.

        Raises INVALID_ARG if the number of values is not a multiple of the number of rows.
        """
        if name not in self._values:
            self._values[name] = self._read(name) if self.request.has(name) else []
        return self._values[name]

    def value(self, name: str, row: int) -> Any:
        """Return the value of an input for a row; None if the input is absent."""
        values = self.values(name)
        return values[row] if values else None

    def _read(self, name: str) -> list[Any]:
        values: list[Any] = self.request.array(name).ravel().tolist()
        if len(values) == 1:
            return values * self.count
        if len(values) % self.count:
            raise invalid(f"input '{name}' has {len(values)} values for the {self.count} rows of the request")
        return values[:: len(values) // self.count] if values else []

    def prompt(self, row: int) -> list[int]:
        """Return the token ids of a row without padding."""
        length, width = int(self._lengths[row]), self._ids.shape[1]
        if not 1 <= length <= width:
            raise invalid(f"input 'input_lengths' is {length} in row {row}, where 'input_ids' has {width} tokens")
        prompt: list[int] = self._ids[row, :length].tolist()
        return prompt

    def words(self, name: str, row: int, most: int) -> list[list[int]]:
        """Return the token sequences in an input ``[rows or 1, 2, ids]``: token ids, and the end of each sequence.

        Raises INVALID_ARG for another shape, for decreasing ends, and for more than ``most`` sequences.
        """
        if not self.request.has(name) or not len(self.request.inputs[name].data):
            return []
        lists = self.request.array(name)
        if lists.ndim < 2 or lists.shape[-2] != 2:
            raise invalid(f"input '{name}' must have a row of token ids and one of the ends of words, shape [2, -1]")
        lists = lists.reshape(-1, *lists.shape[-2:])
        ids, ends = (line.tolist() for line in lists[row if len(lists) > 1 else 0])
        words, start = [], 0
        for end in ends:
            if end < 0:
                break
            if not start <= end <= len(ids):
                raise invalid(f"input '{name}' ends a word at {end} of {len(ids)} token ids, after one at {start}")
            if end > start:
                words.append(ids[start:end])
            start = end
        if len(words) > most:
            raise invalid(f"input '{name}' has {len(words)} words; at most {most} are allowed")
        return words


@dataclass(frozen=True, slots=True)
class TokenInterface:
    """Reads the requests of a model.

    ``decoupled``: a request may have several responses. ``batched``: tensors have a batch dimension. ``exclude_input``
    is the default of ``exclude_input_in_output``. See :class:`TokenOutputOptions` for the others.
    """

    limits: Limits
    decoupled: bool
    batched: bool = True
    max_beam_width: int = 1
    exclude_input: bool = False
    normalize: bool = True
    padded: frozenset[str] = frozenset()

    def response_builder(self, request: Request) -> ResponseBuilder:
        """Read a request and create its response builder. Raises INVALID_ARG or UNSUPPORTED, in one sentence."""
        if request.option("stop", False):
            if not request.id:
                raise invalid("A request id must be provided for request cancellation")
            return StopResponseBuilder(request.id)
        stream = bool(request.option("streaming", False))
        if stream and not self.decoupled:
            raise invalid("Streaming is only supported if model is deployed using decoupled mode.")
        refuse_unsupported(request)
        rows = _Rows(request)
        options = TokenOutputOptions(
            stream=stream,
            together=not self.decoupled,
            batched=self.batched or request.array("input_ids").ndim > 1,
            prompt=not request.option("exclude_input_in_output", self.exclude_input),
            log_probs=bool(request.option("return_log_probs", False) or request.option("output_log_probs", False)),
            normalize=self.normalize,
            padded=self.padded,
        )
        request_rows = [self._row(rows, row, options) for row in range(rows.count)]
        if options.together and len({row.samples * row.sampling.n for row in request_rows}) > 1:
            raise invalid("the rows of a request must have as many sequences each, unless the model is decoupled")
        return TokenResponseBuilder(request_rows, options)

    def _row(self, rows: _Rows, number: int, options: TokenOutputOptions) -> RequestRow:
        overrides = _overrides(rows, number)
        if "max_tokens" not in overrides.values:
            raise invalid("input 'request_output_len' is missing")
        beams, n = overrides.get("beam_width", 1), overrides.get("n")
        if beams > self.max_beam_width:
            raise invalid(f"input 'beam_width' is {beams}, but parameter 'max_beam_width' is {self.max_beam_width}")
        if 1 < beams < (n or 1):
            raise invalid(f"input 'num_return_sequences' is {n}, which is more than 'beam_width', {beams}")
        prompt = rows.prompt(number)
        sampling = _sampling(overrides)
        words = rows.words("bad_words_list", number, MAX_BAD_WORDS)
        sampling.bad_words_token_ids = tuple(tuple(word) for word in words)
        sampling.logit_bias = self._bias(rows, number)
        sampling.logprobs = 0 if options.log_probs else None
        sampling.structured_outputs = _structure(rows.request)
        adapter = rows.value("lora_task_id", number)
        sampling.lora_name = "" if adapter is None else str(adapter)
        self.limits.check(prompt, sampling)
        stops = rows.words("stop_words_list", number, MAX_STOPS)
        self._check_ids("bad_words_list", [token for word in words for token in word])
        self._check_ids("end_id", [sampling.end_id or 0])
        pad = rows.value("pad_id", number)
        pad = pad if pad is not None else sampling.end_id or 0
        return RequestRow(prompt, sampling, 1 if beams > 1 else n or 1, StopWords(stops), pad)

    def _bias(self, rows: _Rows, row: int) -> dict[int, float]:
        """Return the biases of ``embedding_bias`` ``[rows or 1, vocabulary]`` by token id."""
        request = rows.request
        if not request.has("embedding_bias") or not len(request.inputs["embedding_bias"].data):
            return {}
        lines = request.array("embedding_bias")
        lines = lines.reshape(-1, lines.shape[-1])
        line = lines[row if len(lines) > 1 else 0]
        if len(line) > self.limits.engine.vocabulary:
            raise invalid(
                f"input 'embedding_bias' has {len(line)} values; the vocabulary of the model has "
                f"{self.limits.engine.vocabulary} tokens"
            )
        biases = {int(token): float(line[token]) for token in np.flatnonzero(line)}
        if not all(isfinite(bias) for bias in biases.values()):
            raise invalid("input 'embedding_bias' has a value that is not finite")
        return biases

    def _check_ids(self, name: str, ids: list[int]) -> None:
        vocabulary = self.limits.engine.vocabulary
        unknown = next((token for token in ids if not 0 <= token < vocabulary), None)
        if unknown is not None:
            raise invalid(f"input '{name}' has token id {unknown}; the vocabulary of the model has {vocabulary} tokens")


def _overrides(rows: _Rows, number: int) -> SamplingOverrides:
    """Collect the sampling parameters of a row.

    Top-k and top-p of 0 count as absent; a negative ``end_id`` sets ``ignore_eos``.
    """
    overrides = SamplingOverrides()
    for name, parameter in VALUES.items():
        key, value = parameter.name, rows.value(name, number)
        if key in ("top_k", "top_p"):
            value = value or None
        elif key == "end_id" and value is not None and value < 0:
            key, value = "ignore_eos", True
        overrides.set(key, value, f"input '{name}'", label=f"input '{name}'")
    return overrides


def _sampling(overrides: SamplingOverrides) -> SamplingParams:
    """Create sampling parameters with TensorRT-LLM's meaning: without top-k and top-p, decoding is greedy."""
    sampling = SamplingParams(**overrides.values)
    sampling.min_tokens = min(sampling.min_tokens, sampling.max_tokens)
    beams = sampling.beam_width
    sampling.n = overrides.get("n", beams) if beams > 1 else 1
    top = sampling.top_k or "top_p" in overrides.values
    if beams > 1 or not top or sampling.top_k == 1 or sampling.temperature == 0:
        sampling.make_greedy()
    return sampling


def _structure(request: Request) -> Structure | None:
    kind = request.option("guided_decoding_guide_type")
    if not kind:
        return None
    if kind not in _GUIDES:
        raise invalid(f"input 'guided_decoding_guide_type' is '{kind}'; it must be one of {', '.join(_GUIDES)}")
    guide = request.option("guided_decoding_guide")
    if kind == "json":
        return structure_of("json", guide or {"type": "object"}, "guided_decoding_guide")
    return structure_of(_GUIDES[kind], guide, "guided_decoding_guide")
