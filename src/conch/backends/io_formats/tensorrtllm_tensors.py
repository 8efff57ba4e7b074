"""The tensors of backend ``tensorrtllm``: those of configurations, ignored and refused inputs, and output tensors.

The names are those of the in-flight batcher's model ``tensorrt_llm``. A model has the tensors of its configuration,
with the datatypes and dims given there, because both have changed between releases. The service's thread builds the
output tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array, Request, Result
from conch.backends.generation.engine import Progress
from conch.backends.generation.service import ResponseBuilder
from conch.core.errors import unsupported
from conch.core.sampling.parameters import PARAMETERS, SamplingParameter, SamplingParams
from conch.core.tensors import CONFIG_NAME

#: One-value inputs that are sampling parameters, by name.
VALUES: Final[Mapping[str, SamplingParameter]] = {
    name: parameter for parameter in PARAMETERS for name in parameter.inflight_inputs
}
#: Ignored inputs: they concern only TensorRT-LLM, or only models with an encoder.
_IGNORED: Final = frozenset({
    "decoder_input_ids", "decoder_input_lengths", "draft_acceptance_threshold", "prompt_vocab_size",
    "prompt_table_extra_ids", "runtime_top_p_min", "runtime_top_p_reset_ids", "retention_token_range_starts",
    "retention_token_range_ends", "retention_token_range_priorities", "retention_token_range_durations_ms",
    "retention_decode_priority", "retention_decode_duration_ms", "skip_cross_attn_blocks", "request_type",
    "lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size",
})  # fmt: skip
_LORA: Final = "LoRA weights in a request (rather than in parameter 'lora_modules', by their lora_task_id)"
#: Inputs that are refused unless they are empty, and the features that they request.
_REFUSED: Final[Mapping[str, str]] = {
    "prompt_embedding_table": "prompt tables",
    "draft_input_ids": "draft tokens in a request",
    "draft_logits": "draft tokens in a request",
    "encoder_input_features": "models with an encoder",
    "encoder_output_lengths": "models with an encoder",
    "cross_attention_mask": "models with an encoder",
    "context_phase_params": "parameters of disaggregated serving",
    "mrope_rotary_cos_sin": "multimodal rotary positions",
    "mrope_position_deltas": "multimodal rotary positions",
    "lora_weights": _LORA,
    "lora_config": _LORA,
}
#: Flag inputs that are refused if true, and the features that they request.
_REFUSED_FLAGS: Final[Mapping[str, str]] = {
    "return_context_logits": "context logits",
    "return_generation_logits": "generation logits",
    "return_encoder_output": "outputs of an encoder",
    "return_kv_cache_reuse_stats": "statistics of the KV cache by request",
    "return_perf_metrics": "performance metrics by request",
}
_READ: Final = frozenset({
    *VALUES, "input_ids", "input_lengths", "runtime_top_p_decay", "pad_id", "stop_words_list", "bad_words_list",
    "embedding_bias", "beam_search_diversity_rate", "return_log_probs",
    "output_log_probs", "exclude_input_in_output", "stop", "streaming", "lora_task_id", "guided_decoding_guide_type",
    "guided_decoding_guide",
})  # fmt: skip
#: Default optional one-value inputs: sampling parameters (by one of their names) and others.
_OPTIONAL: Final[Mapping[str, str]] = {
    **{known.inflight_inputs[0]: known.type.datatype for known in VALUES.values() if known.name != "max_tokens"},
    "pad_id": "INT32",
    "lora_task_id": "UINT64",
    **dict.fromkeys(("return_log_probs", "exclude_input_in_output", "stop", "streaming"), "BOOL"),
}


def complete_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration (JSON object) with default inputs and outputs if it lists none."""
    completed = dict(config)
    completed["input"] = config.get("input") or [
        _tensor("input_ids", "INT32", -1),
        _tensor("input_lengths", "INT32", 1, optional=True),
        _tensor("request_output_len", "INT32", 1),
        *(_tensor(name, "INT32", 2, -1, optional=True) for name in ("stop_words_list", "bad_words_list")),
        _tensor("embedding_bias", "FP32", -1, optional=True),
        *(_tensor(name, datatype, 1, optional=True) for name, datatype in _OPTIONAL.items()),
        *(_tensor(name, "BYTES", 1, optional=True) for name in ("guided_decoding_guide_type", "guided_decoding_guide")),
    ]
    completed["output"] = config.get("output") or [
        _tensor("output_ids", "INT32", -1, -1),
        _tensor("sequence_length", "INT32", -1),
        _tensor("cum_log_probs", "FP32", -1),
        _tensor("output_log_probs", "FP32", -1, -1),
        _tensor("batch_index", "INT32", 1),
        _tensor("sequence_index", "INT32", 1),
    ]
    return completed


def _tensor(name: str, datatype: str, *dims: int, optional: bool = False) -> dict[str, Any]:
    tensor: dict[str, Any] = {"name": name, "data_type": CONFIG_NAME[datatype], "dims": list(dims)}
    return {**tensor, "optional": True} if optional else tensor


def unknown_inputs(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the inputs of a configuration that have no effect, sorted by name."""
    names = {str(tensor["name"]) for tensor in config.get("input", ())}
    return tuple(sorted(names - _READ - _IGNORED - set(_REFUSED) - set(_REFUSED_FLAGS)))


def refuse_unsupported(request: Request) -> None:
    """Raise UNSUPPORTED for the first input of a request that needs a feature no engine has."""
    for name, what in _REFUSED.items():
        if request.has(name) and len(request.inputs[name].data):
            raise unsupported(f"input '{name}' is given, but {what} are not supported")
    for name, what in _REFUSED_FLAGS.items():
        if request.option(name, False):
            raise unsupported(f"input '{name}' is true, but {what} are not supported")
    for name, neutral in (("runtime_top_p_decay", 1.0), ("beam_search_diversity_rate", 0.0)):
        if request.has(name) and any(value not in (0.0, neutral) for value in request.array(name).ravel().tolist()):
            raise unsupported(f"input '{name}' is not supported: leave it out, or set it to {neutral}")


#: Number of dims of the outputs that every response had before releases with ``batch_index``; zeros if not requested.
ALWAYS: Final = {"cum_log_probs": 1, "output_log_probs": 2, "context_logits": 2, "generation_logits": 3}


class StopWords:
    """Token sequences that end a completion and remain part of it."""

    def __init__(self, words: Sequence[Sequence[int]] = ()) -> None:
        self._by_last: dict[int, list[list[int]]] = {}
        for word in words:
            self._by_last.setdefault(word[-1], []).append(list(word))

    def end(self, tokens: list[int]) -> bool:
        """Whether the non-empty ``tokens`` end with one of the words."""
        return any(tokens[-len(word) :] == word for word in self._by_last.get(tokens[-1], ()))


@dataclass(frozen=True, slots=True)
class TokenOutputOptions:
    """Options for the responses of a request.

    ``stream``: send a response at every step. ``together``: send one response for all rows and sequences, as models
    that are not decoupled do. ``batched``: tensors have a batch dimension. ``prompt``: ``output_ids`` begin with the
    prompt. ``log_probs``: return log-probabilities. ``normalize``: divide the score of a beam by its length.
    ``padded``: the outputs of ``ALWAYS`` that every response has.
    """

    stream: bool = False
    together: bool = False
    batched: bool = True
    prompt: bool = False
    log_probs: bool = False
    normalize: bool = True
    padded: frozenset[str] = frozenset()


@dataclass(slots=True)
class RequestRow:
    """A row of a request: its prompt, sampling parameters and number of samples; ``pad`` is the padding token id."""

    prompt: list[int]
    sampling: SamplingParams
    samples: int = 1
    stop_words: StopWords = field(default_factory=StopWords)
    pad: int = 0


@dataclass(slots=True)
class _Sequence:
    """A completion of a row; ``sent`` is the number of tokens already sent, ``finish`` the finish reason."""

    row: RequestRow
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    score: float = 0.0
    finish: str = ""
    sent: int = 0


@dataclass(slots=True)
class _Item:
    """A sample of a row, or all of its beams: the unit that has its own responses."""

    row: int
    index: int
    sequences: list[_Sequence]
    done: bool = False

    @property
    def ended(self) -> bool:
        return all(sequence.finish for sequence in self.sequences)

    @property
    def fresh(self) -> bool:
        return any(len(sequence.tokens) > sequence.sent for sequence in self.sequences)


class TokenResponseBuilder(ResponseBuilder):
    """Builds the responses of a request in the I/O format ``tensorrtllm``."""

    def __init__(self, rows: Sequence[RequestRow], options: TokenOutputOptions) -> None:
        self.prompts = []
        self._options = options
        self._items: list[_Item] = []
        for number, row in enumerate(rows):
            for index in range(row.samples):
                sampling = row.sampling.for_sample(index) if row.samples > 1 else row.sampling
                self.prompts.append((row.prompt, sampling))
                self._items.append(_Item(number, index, [_Sequence(row) for _ in range(sampling.n)]))
        self._sequences = [sequence for item in self._items for sequence in item.sequences]

    def add(self, index: int, progress: Progress) -> str:
        sequence = self._sequences[index]
        # The stop token is not part of the output.
        tokens = progress.tokens[:-1] if progress.finish == "stop" else progress.tokens
        if progress.cumulative_logprob is not None:
            sequence.score = progress.cumulative_logprob
        for position, token in enumerate(tokens):
            sequence.tokens.append(token)
            if progress.logprobs is not None:
                sequence.logprobs.append(progress.logprobs[position].logprob)
                if progress.cumulative_logprob is None:
                    sequence.score += sequence.logprobs[-1]
            if sequence.row.stop_words.end(sequence.tokens):
                sequence.finish = "stop"
                return sequence.finish
        sequence.finish = progress.finish
        return sequence.finish

    def responses(self, final: bool) -> list[Result]:
        """Return the due responses; with ``final``, the last ones, also for sequences that have not finished."""
        if self._options.together:
            return [self._result(self._items)] if final else []
        results = []
        for item in self._items:
            ended = final or item.ended
            if not item.done and (ended or (self._options.stream and item.fresh)):
                item.done = ended
                results.append(self._result([item]))
        return results

    def _result(self, items: Sequence[_Item]) -> Result:
        rows: dict[int, list[_Sequence]] = {}
        for item in items:
            rows.setdefault(item.row, []).extend(item.sequences)
        grid = list(rows.values())
        outputs = self._tensors(grid)
        outputs["batch_index"] = np.array([[row] for row in rows], np.int32)
        outputs["sequence_index"] = np.full((len(rows), 1), items[0].index, np.int32)
        for line in grid:
            for sequence in line:
                sequence.sent = len(sequence.tokens) if self._options.stream else 0
        return Result({name: array if self._options.batched else array[0] for name, array in outputs.items()})

    def _tensors(self, grid: list[list[_Sequence]]) -> dict[str, Array]:
        """Return the outputs for a grid of sequences ``[rows, sequences]``."""
        options = self._options
        prompts = options.prompt and not options.stream
        tokens = [
            [(sequence.row.prompt if prompts else []) + sequence.tokens[sequence.sent :] for sequence in line]
            for line in grid
        ]
        outputs: dict[str, Array] = {
            "output_ids": _filled(tokens, [line[0].row.pad for line in grid], np.int32),
            "sequence_length": np.array([list(map(len, line)) for line in tokens], np.int32),
        }
        if options.log_probs or options.padded:
            outputs["cum_log_probs"] = np.array([list(map(self._score, line)) for line in grid], np.float32)
            outputs |= self._log_probs(grid)
        for name in options.padded:
            outputs.setdefault(name, np.zeros((len(grid), *[1] * ALWAYS[name]), np.float32))
        return outputs

    def _log_probs(self, grid: list[list[_Sequence]]) -> dict[str, Array]:
        """Return the log-probabilities of the tokens to send, under both output names; empty if some are unknown."""
        if self._options.log_probs and any(
            sequence.tokens and not sequence.logprobs for line in grid for sequence in line
        ):
            return {}
        known = [
            [sequence.logprobs[sequence.sent :] or [0.0] * (len(sequence.tokens) - sequence.sent) for sequence in line]
            for line in grid
        ]
        log_probs = _filled(known, [0.0] * len(grid), np.float32)
        return {"output_log_probs": log_probs, "log_probs": log_probs}

    def _score(self, sequence: _Sequence) -> float:
        sampling = sequence.row.sampling
        if sampling.beam_width == 1 or not self._options.normalize:
            return sequence.score
        return float(sequence.score / max(len(sequence.tokens), 1) ** sampling.length_penalty)


def _filled(grid: Sequence[Sequence[Sequence[float]]], pads: Sequence[float], dtype: type) -> Array:
    """Convert lists of different lengths to an array ``[rows, sequences, longest]``, with one pad value per row."""
    width = max(len(values) for line in grid for values in line)
    filled = [
        [[*values, *[pad] * (width - len(values))] for values in line] for line, pad in zip(grid, pads, strict=True)
    ]
    return np.array(filled, dtype).reshape(len(grid), len(grid[0]), width)
