"""The engine arguments of vLLM: from the model's specification, and as model.json gives them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from conch.backends.base.backend_base import versioned
from conch.backends.generation.engine import EngineSpec
from conch.core.errors import did_you_mean, invalid, one_line

#: The values that vLLM accepts for ``max_lora_rank``.
_RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)
#: The default of ``block_size`` (tokens).
BLOCK: Final = 16
#: Arguments about vLLM's own log, which conch replaces: it takes vLLM's statistics in any case, for its metrics.
_LOGGING: Final = frozenset({"disable_log_requests", "disable_log_stats", "enable_log_requests", "max_log_len"})
#: Arguments that earlier versions of vLLM had, with the argument that has their purpose in later versions, if any.
FORMER_ARGUMENTS: Final[Mapping[str, str]] = {
    "cuda_graph_sizes": "cudagraph_capture_sizes",
    "device": "",
    "disable_async_output_proc": "",
    "disable_logprobs_during_spec_decoding": "",
    "disable_mm_preprocessor_cache": "mm_processor_cache_gb",
    "enable_multimodal_encoder_data_parallel": "mm_encoder_tp_mode",
    "enable_prompt_adapter": "",
    "enable_reasoning": "reasoning_parser",
    "engine_use_ray": "",
    "eplb_log_balancedness": "eplb_config",
    "eplb_step_interval": "eplb_config",
    "eplb_window_size": "eplb_config",
    "full_cuda_graph": "compilation_config",
    "guided_decoding_backend": "structured_outputs_config",
    "guided_decoding_disable_additional_properties": "structured_outputs_config",
    "guided_decoding_disable_any_whitespace": "structured_outputs_config",
    "guided_decoding_disable_fallback": "structured_outputs_config",
    "logits_processor_pattern": "logits_processors",
    "long_lora_scaling_factors": "",
    "lora_extra_vocab_size": "",
    "max_context_len_to_capture": "max_cudagraph_capture_size",
    "max_long_partial_prefills": "",
    "max_num_partial_prefills": "",
    "max_paddings": "",
    "max_prompt_adapter_token": "",
    "max_prompt_adapters": "",
    "max_seq_len_to_capture": "max_cudagraph_capture_size",
    "multi_step_stream_outputs": "",
    "ngram_prompt_lookup_max": "speculative_config",
    "ngram_prompt_lookup_min": "speculative_config",
    "num_lookahead_slots": "",
    "num_redundant_experts": "eplb_config",
    "num_scheduler_steps": "",
    "num_speculative_tokens": "speculative_config",
    "override_neuron_config": "",
    "override_pooler_config": "pooler_config",
    "preemption_mode": "",
    "qlora_adapter_name_or_path": "",
    "quantization_param_path": "",
    "rope_scaling": "hf_overrides",
    "rope_theta": "hf_overrides",
    "scheduler_delay_factor": "",
    "spec_decoding_acceptance_method": "",
    "speculative_disable_by_batch_size": "speculative_config",
    "speculative_disable_mqa_scorer": "",
    "speculative_draft_tensor_parallel_size": "speculative_config",
    "speculative_max_model_len": "speculative_config",
    "speculative_model": "speculative_config",
    "speculative_model_quantization": "speculative_config",
    "swap_space": "",
    "task": "runner",
    "tokenizer_pool_extra_config": "",
    "tokenizer_pool_size": "",
    "tokenizer_pool_type": "",
    "typical_acceptance_sampler_posterior_alpha": "",
    "typical_acceptance_sampler_posterior_threshold": "",
    "use_v2_block_manager": "",
    "worker_use_ray": "distributed_executor_backend",
}
#: Those of them without which a model computes something else.
_DECISIVE: Final = frozenset({
    "logits_processor_pattern", "long_lora_scaling_factors", "qlora_adapter_name_or_path", "quantization_param_path",
    "rope_scaling", "rope_theta",
})  # fmt: skip


def choose_device(spec: EngineSpec) -> None:
    """Hide all GPUs except ``spec.device_id``, unless the arguments request several GPUs.

    Raises INVALID_ARG if CUDA_VISIBLE_DEVICES does not have that GPU.
    """
    several = any(int(spec.arguments.get(f"{kind}_parallel_size", 1)) > 1 for kind in ("tensor", "pipeline"))
    if spec.device != "cuda" or several:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else None
    if devices is not None and spec.device_id >= len(devices):
        raise invalid(f"there is no GPU {spec.device_id}: CUDA_VISIBLE_DEVICES is '{visible}'")
    os.environ["CUDA_VISIBLE_DEVICES"] = str(spec.device_id) if devices is None else devices[spec.device_id]


def engine_arguments(spec: EngineSpec, known: set[str]) -> tuple[dict[str, Any], list[str]]:
    """Return vLLM's engine arguments, and warnings about given arguments that are ignored.

    ``spec.arguments`` override arguments from the rest of the spec; ``known`` are the names that the installed version
    has. Raises INVALID_ARG for an unknown argument, and for one of earlier versions that affects results.
    """
    from vllm.config import StructuredOutputsConfig

    given, warnings = _known(spec.arguments, known)
    # vLLM's default chooses a library for the first request with a structure and keeps it for all later requests;
    # xgrammar ignores constructs that it does not support, such as multipleOf and lookahead.
    structures = {"backend": "guidance"} | dict(given.pop("structured_outputs_config", None) or {})
    arguments: dict[str, Any] = {
        "structured_outputs_config": StructuredOutputsConfig(**structures),
        "model": str(spec.source),
        "tokenizer": str(spec.directory),
        "dtype": spec.dtype,
        "trust_remote_code": spec.trust_remote_code,
        "enable_prefix_caching": spec.prefix_caching,
        "scheduling_policy": "priority",
    }
    if spec.gguf is not None and (spec.directory / "config.json").is_file():
        arguments["hf_config_path"] = str(spec.directory)
    chosen = {
        "max_model_len": spec.context,
        "max_num_seqs": spec.max_sequences,
        "max_num_batched_tokens": spec.max_batched_tokens,
        "num_gpu_blocks_override": -(-spec.cache_tokens // int(spec.arguments.get("block_size") or BLOCK)),
    }
    arguments |= {name: value for name, value in chosen.items() if value}
    if spec.adapters:
        rank = max(map(_rank, spec.adapters.values()))
        arguments |= {"enable_lora": True, "max_loras": len(spec.adapters), "max_lora_rank": rank}
    if spec.speculative:
        method = {"method": "ngram"} if spec.draft is None else {"model": str(spec.draft)}
        arguments["speculative_config"] = {**method, "num_speculative_tokens": spec.draft_tokens or 5}
    return arguments | given, warnings


def _known(arguments: Mapping[str, Any], known: set[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments that the installed version has, and warnings about those that only earlier versions had."""
    given: dict[str, Any] = {}
    warnings: list[str] = []
    for name, value in arguments.items():
        if name in _LOGGING:
            continue
        if name in known:
            given[name] = value
        elif name in FORMER_ARGUMENTS:
            instead = f"; its successor is '{FORMER_ARGUMENTS[name]}'" if FORMER_ARGUMENTS[name] else ""
            problem = f"{versioned('vllm')} no longer has the engine argument '{name}'{instead}"
            if name in _DECISIVE and value is not None:
                raise invalid(f"{problem}: without it, the results would be different")
            warnings.append(f"{problem}: it is ignored")
        else:
            hint = did_you_mean(name, known | FORMER_ARGUMENTS.keys())
            raise invalid(f"'{name}' is not an engine argument of vLLM{'; ' + hint if hint else ''}")
    return given, warnings


def _rank(adapter: Path) -> int:
    try:
        rank = int(json.loads((adapter / "adapter_config.json").read_bytes())["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise invalid(f"'{adapter}' is not a LoRA adapter: {one_line(error)}") from None
    for size in _RANKS:
        if rank <= size:
            return size
    raise invalid(f"the LoRA adapter '{adapter}' has rank {rank}, vLLM takes at most {_RANKS[-1]}")
