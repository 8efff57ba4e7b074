"""The parameters of text generation models, and the options of the engine and the worker that they set.

``checkpoints/options.py`` has the parameters of every checkpoint, ``conch/core/sampling/parameters.py`` those of
requests. Runs in workers at load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from conch.backends.generation.draft import find_draft, speculative_method
from conch.backends.generation.engine import EngineSpec
from conch.backends.generation.media import CACHE_BYTES, MediaSpec, ProjectorSpec
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer
from conch.config.parameters import Parameter
from conch.core.errors import invalid
from conch.machine.facts import openmp_threads, usable_cores
from conch.wire.output.formats import CALLS

#: The types of the KV cache of engine ``llamacpp``.
CACHE_VALUES: Final = "`f32`, `f16`, `bf16`, `q8_0`, `q5_1`, `q5_0`, `q4_1`, `q4_0`, `iq4_nl`"
#: The arguments of llama.cpp that a model may set, by llama.cpp's names.
LLAMACPP_PARAMETERS: Final = (
    Parameter("n_gpu_layers", "layers", "all on a GPU", "engine `llamacpp`: layers that run on the GPU"),
    Parameter("n_ubatch", "tokens", "512", "engine `llamacpp`: tokens that the network computes at once"),
    Parameter("type_k", CACHE_VALUES, "`f16`", "engine `llamacpp`: the type of keys in the KV cache"),
    Parameter("type_v", CACHE_VALUES, "`f16`", "engine `llamacpp`: the type of values in the KV cache"),
    Parameter("flash_attn", "`auto`, `on`, `off`", "`auto`", "engine `llamacpp`: flash attention"),
    Parameter(
        "kv_unified", "`true`, `false`", "`true`", "engine `llamacpp`: whether all sequences share the whole KV cache"
    ),
    Parameter(
        "cache_ram",
        "MiB",
        "the size of the KV cache",
        "engine `llamacpp`: memory for the tokens of ended sequences outside the KV cache",
    ),
    Parameter(
        "mmproj",
        "file",
        "`*mmproj*.gguf` beside the only model in a folder",
        "engine `llamacpp`: the projector that reads images and recordings",
    ),
)

GENERATION_PARAMETERS: Final = (
    Parameter("max_model_len", "tokens", "the checkpoint's", "maximum tokens of a prompt and its completion"),
    Parameter("max_num_seqs", "sequences", "the engine's", "sequences in the running batch"),
    Parameter("max_num_batched_tokens", "tokens", "the engine's", "tokens of prompts in a step"),
    Parameter("kv_cache_tokens", "tokens", "the engine's", "tokens that the KV cache holds"),
    Parameter(
        "batch_scheduler_policy",
        "`max_utilization`, `guaranteed_no_evict`",
        "`max_utilization`",
        "start a sequence when its prompt fits into the KV cache, or only when its maximum length fits",
    ),
    Parameter(
        "enable_prefix_caching",
        "`true`, `false`",
        "`true`",
        "reuse the KV cache of earlier prompts with the same beginning",
    ),
    Parameter(
        "batch_invariant",
        "`true`, `false`",
        "`false`",
        "responses do not depend on other requests, at the cost of one sequence per run of the network",
    ),
    Parameter("max_tokens", "tokens", "the checkpoint's, else 256", "the default of the sampling parameter"),
    Parameter("default_temperature", "number", "the checkpoint's", "the temperature of requests that set none"),
    Parameter("chat_template", "file", "the checkpoint's", "a Jinja template that converts a conversation to a prompt"),
    Parameter("chat_template_timeout", "seconds", "5", "processor time that the template may take for a conversation"),
    Parameter("output_format", "name", "the template's", "how it writes [tool calls](openai.md#tools-and-reasoning)"),
    Parameter("structured_output_timeout", "seconds", "5", "time that a JSON schema or grammar may take to compile"),
    Parameter("speculative_method", "`draft_model`, `ngram`", "none", "how the next tokens are guessed"),
    Parameter("speculative_model", "folder", "none", "a smaller checkpoint that guesses the next tokens"),
    Parameter("num_speculative_tokens", "tokens", "5", "tokens that are guessed at a time, at most 32"),
    Parameter("lora_modules", "JSON", "none", "LoRA adapters (folders or GGUF files) by the names that requests use"),
    Parameter("lora_folders", "JSON", "none", "folders from which clients may load LoRA adapters at run time: a list"),
    Parameter("lora_cache_bytes", "bytes", "1073741824", "memory for the adapters that clients have loaded"),
    Parameter("max_lora_rank", "number", "256", "the highest rank of an adapter that clients load"),
    Parameter("max_media", "number", "32", "images and recordings in a prompt"),
    Parameter(
        "media_cache_bytes", "bytes", "268435456", "memory for the features of images and recordings of earlier prompts"
    ),
    *LLAMACPP_PARAMETERS,
)


#: The values of parameter ``batch_scheduler_policy``, as in the in-flight batcher.
POLICIES: Final = ("max_utilization", "guaranteed_no_evict")


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """Options of a worker that do not depend on the engine.

    ``max_tokens`` is the maximum length of a completion if the request sets none (0: the checkpoint's value).
    ``truncate`` shortens prompts that exceed the context instead of refusing them. With ``reserve``, a request starts
    only when the KV cache can hold it at its maximum length. ``chat_template`` is a file that replaces the checkpoint's
    template. ``output_format`` is the name of the format of tool calls; empty for the one of the template.
    ``default_temperature`` is None if the checkpoint's applies.
    """

    max_tokens: int = 0
    truncate: bool = False
    reserve: bool = False
    chat_template: Path | None = None
    output_format: str = ""
    default_temperature: float | None = None

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, *, policy: str = POLICIES[0]) -> ServingOptions:
        """Read the checkpoint's options; ``policy`` is the default of ``batch_scheduler_policy``.

        Raises INVALID_ARG with the name of the parameter.
        """
        options = checkpoint.options
        policy = _choice(options, "batch_scheduler_policy", POLICIES, policy)
        template = options.text("chat_template")
        temperature = options.number("default_temperature", -1)
        if temperature < 0 and "default_temperature" in options.extra:
            raise invalid(f"parameter 'default_temperature' is {temperature:g}; it must be 0 or more")
        return cls(
            max_tokens=options.integer("max_tokens"),
            default_temperature=temperature if temperature >= 0 else None,
            truncate=options.truncation == "truncate",
            reserve=policy == "guaranteed_no_evict",
            chat_template=checkpoint.named_path("chat_template", template) if template else None,
            output_format=_choice(options, "output_format", tuple(CALLS), "") if options.text("output_format") else "",
        )


def engine_spec(
    checkpoint: Checkpoint,
    instance: Mapping[str, Any],
    tokenizer: TextTokenizer | None,
    *,
    arguments: Mapping[str, Any] | None = None,
    media: MediaSpec | None = None,
) -> EngineSpec:
    """Return the spec of a checkpoint for the device of ``instance``. Raises INVALID_ARG with the parameter's name."""
    options, graph = checkpoint.options, checkpoint.graph_file("openvino")
    context = options.integer("max_model_len")
    if checkpoint.positions and context > checkpoint.positions:
        raise invalid(
            f"parameter 'max_model_len' is {context}, but checkpoint {checkpoint.source} has only "
            f"{checkpoint.positions} positions"
        )
    return EngineSpec(
        directory=graph.parent if graph is not None else checkpoint.directory,
        config=checkpoint.config,
        eos_ids=tokenizer.special.eos_ids if tokenizer is not None else (),
        gguf=checkpoint.gguf,
        device="cuda" if instance["kind"] == "GPU" else "cpu",
        device_id=int(instance["device_id"]),
        threads=options.threads or openmp_threads(usable_cores(), 1),
        dtype=_dtype(checkpoint),
        trust_remote_code=options.trust_remote_code,
        context=context or checkpoint.positions,
        max_sequences=options.integer("max_num_seqs"),
        max_batched_tokens=options.integer("max_num_batched_tokens"),
        cache_tokens=options.integer("kv_cache_tokens"),
        prefix_caching=options.flag("enable_prefix_caching", True),
        batch_invariant=options.flag("batch_invariant"),
        adapters={name: checkpoint.named_path("lora_modules", path) for name, path in options.adapters.items()},
        adapter_folders=[checkpoint.named_path("lora_folders", path) for path in options.adapter_folders],
        speculative=speculative_method(options),
        draft=find_draft(checkpoint, tokenizer),
        draft_tokens=options.integer("num_speculative_tokens"),
        arguments=arguments or {},
        tokenizer=tokenizer,
        media=media,
        projector=ProjectorSpec(checkpoint.projector, options.positive("media_cache_bytes", CACHE_BYTES))
        if checkpoint.projector is not None
        else None,
    )


def library_arguments(engine: str, options: Options) -> dict[str, str]:
    """Return the arguments of the engine's library among the parameters. Raises INVALID_ARG for those of another."""
    given = {parameter.name: options.text(parameter.name) for parameter in LLAMACPP_PARAMETERS}
    given = {name: text for name, text in given.items() if text}
    if given and engine != "llamacpp":
        raise invalid(
            f"parameter '{next(iter(given))}' is for engine 'llamacpp', but the model runs on engine '{engine}'"
        )
    return given


def _dtype(checkpoint: Checkpoint) -> str:
    """Return the parameter ``dtype``; for ``auto``, float32 if ``conch convert`` checked the graph in float32."""
    dtype, variant = checkpoint.options.dtype, checkpoint.variant
    exact = dtype == "auto" and variant is not None and variant.precision == "fp32"
    return "float32" if exact else dtype


def _choice(options: Options, name: str, choices: tuple[str, ...], default: str) -> str:
    text = options.text(name) or default
    if text not in choices:
        raise invalid(f"parameter '{name}' is '{text}'; it must be one of {', '.join(choices)}")
    return text
