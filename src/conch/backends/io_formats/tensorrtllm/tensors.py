"""The tensors of backend ``tensorrtllm``: defaults for configurations, and ignored and refused inputs.

The names are those of the in-flight batcher's model ``tensorrt_llm``. A model has the tensors of its configuration,
with the datatypes and dims given there, because both have changed between releases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from conch.backends.base.arrays import Request
from conch.core.errors import unsupported
from conch.core.sampling.parameters import PARAMETERS, SamplingParameter
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
