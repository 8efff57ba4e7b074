"""The backend ``tensorrtllm``: serves the in-flight batcher's model ``tensorrt_llm`` on any of conch's engines.

Keys and defaults of parameters are those of Triton's TensorRT-LLM backend, but parameters that name a compiled engine
in Triton name a checkpoint here. A value that is an unfilled placeholder ``${…}`` of a template counts as not set. Runs
in workers; the threads that read frames also read requests here.
Source: triton-inference-server/tensorrtllm_backend.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Request, Result
from conch.backends.generation.generation_backend import GenerationBackend
from conch.backends.generation.options import GENERATION_PARAMETERS, ServingOptions
from conch.backends.generation.sampling import Limits, SamplingOverrides
from conch.backends.generation.service import ImmediateResponse, ResponseBuilder
from conch.backends.io_formats.tensorrtllm_tensors import (
    ALWAYS,
    VALUES,
    RequestRow,
    StopWords,
    TokenOutputOptions,
    TokenResponseBuilder,
    complete_config,
    refuse_unsupported,
    unknown_inputs,
)
from conch.checkpoints.files import json_object
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.hub import MODEL_DIRECTORY
from conch.checkpoints.options import CHECKPOINT_PARAMETERS, Options
from conch.checkpoints.tokenizers.open import open_tokenizer
from conch.config.parameters import ParameterTable, parameter_texts
from conch.core.errors import invalid, unsupported
from conch.core.sampling import TEXT_GENERATION
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

    def words(self, name: str, row: int, max_words: int) -> list[list[int]]:
        """Return the token sequences in an input ``[rows or 1, 2, ids]``: token ids, and the end of each sequence.

        Raises INVALID_ARG for another shape, for decreasing ends, and for more than ``max_words`` sequences.
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
        if len(words) > max_words:
            raise invalid(f"input '{name}' has {len(words)} words; at most {max_words} are allowed")
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
            return ImmediateResponse(Result({}), ends_id=request.id)
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
            raise invalid("the rows of a request must have the same number of sequences, unless the model is decoupled")
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
        self.limits.check_token_ids("input 'bad_words_list'", [token for word in words for token in word])
        self.limits.check_token_ids("input 'end_id'", [sampling.end_id or 0])
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


_PLACEHOLDER: Final = re.compile(r"\s*\$\{[^{}]*\}\s*")

#: Parameters that name the checkpoint; the first one that is set applies.
_PATHS: Final = ("gpt_model_path", "engine_dir", "model")
_MODEL_TYPES: Final = ("v1", "inflight_batching", "inflight_fused_batching")
_DECODING: Final = ("auto", "top_k", "top_p", "top_k_top_p", "beam_search")
_SPECULATIVE: Final = ("medusa", "redrafter", "lookahead", "eagle", "explicit_draft_tokens")

#: Parameters with the same name and meaning as in conch's other text generation backends.
_OWN: Final = tuple(
    parameter
    for parameter in (*CHECKPOINT_PARAMETERS, *GENERATION_PARAMETERS)
    if parameter.name not in ("model", "task", "max_tokens", "chat_template")
)
#: Parameters of Triton's backend that are supported.
_READ: Final = frozenset({
    *_PATHS, "gpt_model_type", "max_beam_width", "exclude_input_in_output", "normalize_log_probs", "decoding_mode",
    "encoder_model_path", "kv_cache_free_gpu_mem_fraction", "enable_chunked_context", "enable_kv_cache_reuse",
    "max_tokens_in_paged_kv_cache",
})  # fmt: skip
#: Ignored parameters: they tune only TensorRT-LLM.
_IGNORED: Final = frozenset({
    "max_attention_window_size", "sink_token_length", "kv_cache_host_memory_bytes", "kv_cache_onboard_blocks",
    "cross_kv_cache_fraction", "cancellation_check_period_ms", "stats_check_period_ms", "iter_stats_max_iterations",
    "request_stats_max_iterations", "medusa_choices", "eagle_choices", "gpu_weights_percent", "multi_block_mode",
    "enable_context_fmha_fp32_acc", "cuda_graph_mode", "cuda_graph_cache_size", "gpu_device_ids", "participant_ids",
    "executor_worker_path", "lora_cache_optimal_adapter_size", "lora_cache_max_adapter_size",
    "lora_cache_gpu_memory_fraction", "lora_cache_host_memory_bytes", "lora_prefetch_dir", "enable_trt_overlap",
    "FORCE_CPU_ONLY_INPUT_TENSORS", "tokenizer_dir", "tokenizer_type", "xgrammar_tokenizer_info_path",
    "guided_decoding_backend", "max_num_sequences", "max_queue_size", "speculative_decoding_fast_logits",
    "lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size", "encoder_engine_dir",
})  # fmt: skip
PARAMETERS: Final = ParameterTable("tensorrtllm", _OWN, _READ | _IGNORED)


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parsed parameters of a model.

    ``options`` are those of a text generation model. ``arguments`` are engine arguments for vLLM. ``unknown`` are names
    that have no effect and do not resemble a known parameter. Without ``normalize``, the score of a beam is not divided
    by its length.
    """

    options: Options
    max_beam_width: int = 1
    exclude_input: bool = False
    normalize: bool = True
    arguments: Mapping[str, Any] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any], version_directory: Path) -> Parameters:
        """Parse the parameters of a configuration (JSON object).

        Raises INVALID_ARG with the name of an invalid parameter, and UNSUPPORTED for features that no engine has.
        """
        texts = set_parameters(config)
        _check(texts)
        options = Options.from_values({name: text for name, text in texts.items() if name in _READ - {*_PATHS}})
        values: dict[str, Any] = {
            "kv_cache_tokens": options.integer("max_tokens_in_paged_kv_cache"),
            "enable_prefix_caching": options.flag("enable_kv_cache_reuse"),
            **{known.name: texts[known.name] for known in _OWN if known.name in texts},
            "model": checkpoint_path(next((texts[name] for name in _PATHS if name in texts), ""), version_directory),
            "task": TEXT_GENERATION,
        }
        return cls(
            Options.from_values(values),
            max_beam_width=max(options.integer("max_beam_width", 1), 1),
            exclude_input=options.flag("exclude_input_in_output"),
            normalize=options.flag("normalize_log_probs", True),
            arguments=_arguments(options),
            unknown=tuple(PARAMETERS.check(texts)),
        )


def set_parameters(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters that have a value, neither empty nor an unfilled placeholder."""
    texts = parameter_texts(config)
    return {name: text.strip() for name, text in texts.items() if text.strip() and not _PLACEHOLDER.fullmatch(text)}


def _check(texts: Mapping[str, str]) -> None:
    if texts.get("gpt_model_type", "v1").lower() not in _MODEL_TYPES:
        raise invalid("Invalid gpt_model_type. Must be v1/inflight_batching/inflight_fused_batching.")
    policy = texts.get("batch_scheduler_policy", "guaranteed_no_evict")
    if policy not in ("max_utilization", "guaranteed_no_evict"):
        raise invalid(
            "batch_scheduler_policy parameter was not found or is invalid (must be max_utilization or "
            f"guaranteed_no_evict): it is '{policy}'"
        )
    if "encoder_model_path" in texts:
        raise unsupported("parameter 'encoder_model_path' is set, but models with an encoder are not supported")
    mode = texts.get("decoding_mode", "auto").lower()
    if mode in _SPECULATIVE:
        raise unsupported(
            f"parameter 'decoding_mode' is '{mode}', which is not supported: for speculative decoding set parameter "
            "'speculative_model' to a draft model"
        )
    if mode not in _DECODING:
        raise invalid(f"parameter 'decoding_mode' is '{mode}'; it must be one of {', '.join(_DECODING)}")


def _arguments(options: Options) -> dict[str, Any]:
    """Return engine arguments for vLLM; no other engine divides the memory of a GPU."""
    arguments: dict[str, Any] = {}
    if "kv_cache_free_gpu_mem_fraction" in options.explicit:
        fraction = options.number("kv_cache_free_gpu_mem_fraction")
        if not 0 < fraction <= 1:
            raise invalid(f"parameter 'kv_cache_free_gpu_mem_fraction' is {fraction}; it must be above 0 and at most 1")
        arguments["gpu_memory_utilization"] = fraction
    if "enable_chunked_context" in options.explicit:
        arguments["enable_chunked_prefill"] = options.flag("enable_chunked_context")
    return arguments


def checkpoint_path(text: str, version_directory: Path) -> str:
    """Return the checkpoint for a path to a compiled engine, or ``text`` unchanged for any other path.

    If the subfolders of a compiled engine contain exactly one checkpoint, that is its source; otherwise INVALID_ARG is
    raised.
    """
    path = Path(text.replace(MODEL_DIRECTORY, str(version_directory.parent)))
    for folder in (version_directory / path, version_directory.parent / path):
        if _is_compiled(folder):
            below = [
                config.parent for config in sorted(folder.glob("*/config.json")) if "model_type" in json_object(config)
            ]
            if len(below) == 1:
                return str(below[0])
            raise invalid(
                f"{folder} holds a compiled TensorRT-LLM engine, which only TensorRT-LLM runs: set parameter "
                "'gpt_model_path' to the checkpoint that it was built from, a folder or an id on the Hugging Face Hub"
            )
        if folder.is_dir():
            break
    return text


def _is_compiled(folder: Path) -> bool:
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return False
    return any(folder.glob("*.engine")) or not {"builder_config", "build_config"}.isdisjoint(
        json_object(folder / "config.json")
    )


class TensorRtLlmBackend(GenerationBackend):
    """A checkpoint with the tensors of the in-flight batcher: token ids in, token ids out."""

    def complete(self) -> str:
        return json.dumps(complete_config(self.config))

    def load(self, instance: Mapping[str, Any]) -> None:
        directory = Path(self.model["version_directory"])
        parameters = Parameters.of(self.config, directory)
        self._warn(parameters)
        checkpoint = Checkpoint.open(directory, parameters.options)
        self.warn_of(checkpoint.warning)
        settings = ServingOptions.from_checkpoint(checkpoint, policy="guaranteed_no_evict")
        tokenizer = open_tokenizer(checkpoint)
        engine = self.open_engine(
            checkpoint, instance, tokenizer, lambda name: parameters.arguments if name == "vllm" else {}
        )
        self.runtime_facts["checkpoint"] = str(checkpoint.directory)
        outputs = {str(output["name"]) for output in self.config.get("output", ())}
        io_format = TokenInterface(
            Limits(engine),
            decoupled=self.decoupled,
            batched=int(self.config.get("max_batch_size") or 0) > 0,
            max_beam_width=parameters.max_beam_width,
            exclude_input=parameters.exclude_input,
            normalize=parameters.normalize,
            padded=frozenset() if "batch_index" in outputs else frozenset(ALWAYS) & outputs,
        )
        self.serve(engine, io_format, reserve=settings.reserve)

    def _warn(self, parameters: Parameters) -> None:
        """Log the parameters and inputs of the configuration that have no effect."""
        self.log_without_effect("parameters", parameters.unknown)
        self.log_without_effect("inputs", unknown_inputs(self.config))
