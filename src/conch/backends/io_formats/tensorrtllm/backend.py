"""The backend ``tensorrtllm``: serves the in-flight batcher's model ``tensorrt_llm`` on any of conch's engines.

Parameters that name a compiled engine in Triton name a checkpoint here. Runs in workers.
Source: triton-inference-server/tensorrtllm_backend.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from conch.backends.generation.backend import GenerationBackend
from conch.backends.generation.limits import Limits
from conch.backends.generation.model_parameters import GENERATION_PARAMETERS
from conch.backends.generation.options import ServingOptions
from conch.backends.io_formats.tensorrtllm.interface import TokenInterface
from conch.backends.io_formats.tensorrtllm.responses import ALWAYS
from conch.backends.io_formats.tensorrtllm.tensors import complete_config, unknown_inputs
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.hub import MODEL_DIRECTORY
from conch.checkpoints.options import CHECKPOINT_PARAMETERS, Options
from conch.checkpoints.tokenizers.open import open_tokenizer
from conch.config.parameters import ParameterTable
from conch.config.reading import read_json
from conch.core.errors import invalid, unsupported
from conch.core.sampling import TEXT_GENERATION

# Keys and defaults are those of Triton's TensorRT-LLM backend. A value that is an unfilled placeholder ``${…}`` of a
# template counts as not set. Runs in workers at load.


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
    parameters = config.get("parameters") or {}
    texts = {name: str(value.get("string_value", "")) for name, value in parameters.items()}
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
    if "kv_cache_free_gpu_mem_fraction" in options.given:
        fraction = options.number("kv_cache_free_gpu_mem_fraction")
        if not 0 < fraction <= 1:
            raise invalid(f"parameter 'kv_cache_free_gpu_mem_fraction' is {fraction}; it must be above 0 and at most 1")
        arguments["gpu_memory_utilization"] = fraction
    if "enable_chunked_context" in options.given:
        arguments["enable_chunked_prefill"] = options.flag("enable_chunked_context")
    return arguments


def checkpoint_path(text: str, version_directory: Path) -> str:
    """Return the checkpoint for a path to a compiled engine, or ``text`` unchanged if it is no compiled engine.

    If the subfolders of a compiled engine contain exactly one checkpoint, that is its source; otherwise INVALID_ARG is
    raised.
    """
    path = Path(text.replace(MODEL_DIRECTORY, str(version_directory.parent)))
    for folder in (version_directory / path, version_directory.parent / path):
        if _is_compiled(folder):
            below = [
                config.parent for config in sorted(folder.glob("*/config.json")) if "model_type" in _object(config)
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
        _object(folder / "config.json")
    )


def _object(path: Path) -> dict[str, Any]:
    try:
        document = read_json(path)
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


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
        contract = TokenInterface(
            Limits(engine),
            decoupled=self.decoupled,
            batched=int(self.config.get("max_batch_size") or 0) > 0,
            max_beam_width=parameters.max_beam_width,
            exclude_input=parameters.exclude_input,
            normalize=parameters.normalize,
            padded=frozenset() if "batch_index" in outputs else frozenset(ALWAYS) & outputs,
        )
        self.serve(engine, contract, reserve=settings.reserve)

    def _warn(self, parameters: Parameters) -> None:
        """Log the parameters and inputs of the configuration that have no effect."""
        self.log_without_effect("parameters", parameters.unknown)
        self.log_without_effect("inputs", unknown_inputs(self.config))
