"""The backend ``vllm``: serves models of Triton's vLLM backend on any of conch's engines.

``model.json`` in the version directory holds vLLM's engine arguments, ``multi_lora.json`` next to it the adapters.
Source: triton-inference-server/vllm_backend.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from conch.backends.base.arrays import Request, Result
from conch.backends.engines.vllm.arguments import FORMER_ARGUMENTS
from conch.backends.generation.options import GENERATION_PARAMETERS, ServingOptions
from conch.backends.generation.sampling import Defaults, UnknownAdapter
from conch.backends.generation.service import ResponseBuilder
from conch.backends.io_formats.text import TextBackend
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.hub import is_checkpoint_folder
from conch.checkpoints.options import CHECKPOINT_PARAMETERS, Options
from conch.config.parameters import ParameterTable
from conch.config.reading import read_json
from conch.core.errors import Code, ConchError, invalid, why_unreadable
from conch.machine import extras
from conch.workers.child.packing import Packer

#: Engine arguments that apply to every engine, with the equivalent model parameters.
_PARAMETERS: Final[Mapping[str, str]] = {
    "model": "model",
    "revision": "revision",
    "dtype": "dtype",
    "download_dir": "cache_dir",
    "trust_remote_code": "trust_remote_code",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "enable_prefix_caching": "enable_prefix_caching",
}
PARAMETERS: Final = ParameterTable(
    "vllm",
    (*CHECKPOINT_PARAMETERS, *GENERATION_PARAMETERS),
    # Parameters of Triton's vLLM backend.
    frozenset({"ENABLE_VLLM_HEALTH_CHECK", "FORCE_CPU_ONLY_INPUT_TENSORS", "REPORT_CUSTOM_METRICS"}),
)
#: Known engine arguments of vLLM; an unknown name that resembles a known one is refused as misspelt.
ENGINE_ARGUMENTS: Final = ParameterTable(
    "vllm",
    accepted=frozenset({
        *_PARAMETERS, *FORMER_ARGUMENTS,
        "block_size", "code_revision", "compilation_config", "config_format", "cpu_offload_gb",
        "data_parallel_size", "data_parallel_size_local", "disable_custom_all_reduce", "disable_log_requests",
        "disable_log_stats", "ec_transfer_config", "max_num_scheduled_tokens", "weight_transfer_config",
        "distributed_executor_backend", "enable_chunked_prefill", "enable_expert_parallel", "enable_lora",
        "enable_log_requests", "enable_sleep_mode", "enforce_eager", "fully_sharded_loras", "generation_config",
        "gpu_memory_utilization", "hf_overrides", "hf_token", "kv_cache_dtype", "kv_cache_memory_bytes",
        "kv_transfer_config", "limit_mm_per_prompt", "load_format", "logprobs_mode", "lora_dtype",
        "max_cpu_loras", "max_logprobs", "max_lora_rank", "max_loras", "max_parallel_loading_workers",
        "mm_processor_kwargs", "model_impl", "model_loader_extra_config", "num_gpu_blocks_override",
        "override_generation_config", "pipeline_parallel_size", "quantization", "reasoning_parser", "runner",
        "scheduling_policy", "seed", "served_model_name", "skip_tokenizer_init", "speculative_config",
        "structured_outputs_config", "tensor_parallel_size", "tokenizer", "tokenizer_mode",
        "tokenizer_revision",
    }),
)  # fmt: skip
#: Engine arguments that name files that vLLM itself finds or downloads.
_ELSEWHERE: Final = (
    "tokenizer", "generation_config", "code_revision", "model_loader_extra_config", "speculative_model",
    "speculative_config",
)  # fmt: skip
_SPECULATIVE: Final = ("speculative_model", "speculative_config")
_DTYPES: Final[Mapping[str, str]] = {"half": "float16", "float": "float32"}


class VllmBackend(TextBackend):
    """A text model with the files, tensors, defaults and error texts of Triton's vLLM backend."""

    def open_checkpoint(self) -> Checkpoint:
        directory = Path(self.model["version_directory"])
        self._arguments = _read_object(directory / "model.json")
        if not isinstance(self._arguments.get("model"), str):
            raise invalid(f"'{directory / 'model.json'}' must name the model: a Hub id or a folder as \"model\"")
        self.check_parameters(PARAMETERS)
        ENGINE_ARGUMENTS.check(self._arguments)
        self._check_kind()
        values: dict[str, Any] = {
            parameter: self._arguments[argument]
            for argument, parameter in _PARAMETERS.items()
            if self._arguments.get(argument) is not None
        }
        values["dtype"] = _DTYPES.get(str(values.get("dtype", "auto")), values.get("dtype", "auto"))
        if self._arguments.get("enable_lora") and (directory / "multi_lora.json").is_file():
            values["lora_modules"] = json.dumps(_read_object(directory / "multi_lora.json"))
        options = Options.from_config(self.config)
        return Checkpoint.open(directory, options, model_file=values)

    def defaults(self, generation: Mapping[str, Any], settings: ServingOptions) -> Defaults:
        return Defaults.of_vllm()

    def choose_engine(self, checkpoint: Checkpoint, instance: Mapping[str, Any]) -> str:
        """Return ``vllm`` if it is installed, also for CPUs, unless the parameter ``engine`` names another engine.

        Other engines serve GGUF files, which vLLM no longer reads.
        """
        if checkpoint.options.engine == "auto" and checkpoint.gguf is None and find_spec("vllm") is not None:
            return "vllm"
        return super().choose_engine(checkpoint, instance)

    def load(self, instance: Mapping[str, Any]) -> None:
        engine = self.choose_engine(self._checkpoint, instance)
        super().load(instance)
        if engine != "vllm":
            self.runtime_facts["instead_of"] = "vllm"

    def arguments(self, engine: str) -> Mapping[str, Any]:
        others = {name: value for name, value in self._arguments.items() if name not in _PARAMETERS}
        if others and is_checkpoint_folder(Path(self.model["version_directory"])):
            # Some engine arguments name code to import, and a checkpoint's folder is not trusted to do that.
            self.warn_of(
                f"model.json lies in a checkpoint's folder, so its engine arguments {', '.join(sorted(others))} are "
                "ignored: name the checkpoint in a model.json in a separate folder"
            )
            return {}
        if engine == "vllm":
            self.dependencies += [("unknown", f"'{name}' of model.json") for name in _ELSEWHERE if others.get(name)]
            return others
        others.pop("enable_lora", None)
        if any(others.get(name) for name in _SPECULATIVE):
            raise invalid(
                f"speculative decoding is not supported by engine '{engine}' with vLLM's arguments: install vLLM, or "
                "use parameter 'speculative_method' on the engines llamacpp and openvino"
            )
        if self._checkpoint.options.engine == "auto":
            self.warn_of(
                f"vLLM is not installed here ({extras.command_for('vllm')}), so engine '{engine}' serves the model"
            )
        self.log_without_effect("engine arguments", sorted(others))
        return {}

    def response_builder(self, request: Request) -> ResponseBuilder:
        try:
            if request.has("embedding_request"):
                raise invalid(f"Model {self._arguments['model']} does not support 'embed' request")
            return super().response_builder(request)
        except UnknownAdapter as error:
            if not error.known:
                raise invalid("LoRA feature is not enabled.", error.param) from None
            raise invalid(
                f"LoRA {error.name} is not supported, we currently support {list(error.known)}", error.param
            ) from None
        except ConchError as error:
            raise _with_triton_prefix(error) from None

    def pack(self, request: Request, result: Result | ConchError, packer: Packer) -> dict[str, Any]:
        return super().pack(request, _with_triton_prefix(result) if isinstance(result, ConchError) else result, packer)

    def _check_kind(self) -> None:
        width = 1
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            value = self._arguments.get(name, 1)
            width *= value if isinstance(value, int) else 1
        if width > 1 and any(group.get("kind") == "KIND_GPU" for group in self.config.get("instance_group") or ()):
            raise invalid(
                "KIND_GPU is currently for single-GPU models, please specify KIND_MODEL in the model's config.pbtxt "
                "for multi-GPU models"
            )


def _with_triton_prefix(error: ConchError) -> ConchError:
    """Prefix the error of a request as Triton's vLLM backend does, except for cancellations and timeouts."""
    if error.code in (Code.CANCELLED, Code.UNAVAILABLE):
        return error
    return error.prefixed("Error generating stream: ")


def _read_object(path: Path) -> dict[str, Any]:
    try:
        document = read_json(path)
    except FileNotFoundError:
        raise invalid(f"'{path.name}' containing vllm engine args must be provided in '{path.parent}'") from None
    except (OSError, ValueError) as error:
        raise invalid(f"{path} cannot be read: {why_unreadable(error)}") from None
    if not isinstance(document, dict):
        raise invalid(f"{path} must hold a JSON object")
    return document
