"""The backend ``vllm``: a model as Triton's vLLM backend has it, on whichever engine there is.

``model.json`` in the version directory holds vLLM's engine arguments, ``multi_lora.json`` beside it the adapters.
Source: triton-inference-server/vllm_backend.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from conch.backends.contracts.text.backend import TextBackend
from conch.backends.generation.defaults import Defaults
from conch.backends.generation.engine_choice import ServingOptions
from conch.backends.generation.job import ResponseBuilder
from conch.backends.generation.limits import UnknownAdapter
from conch.backends.native.arrays import Request
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.errors import ConchError, invalid

#: Engine arguments that every engine here understands, and the model parameter that each becomes.
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
_SPECULATIVE: Final = ("speculative_model", "speculative_config")
_DTYPES: Final[Mapping[str, str]] = {"half": "float16", "float": "float32"}


class VllmBackend(TextBackend):
    """A text model with vLLM's files, tensors, defaults and texts of errors."""

    def open_checkpoint(self) -> Checkpoint:
        directory = Path(self.model["version_directory"])
        self._arguments = _read_object(directory / "model.json")
        if not isinstance(self._arguments.get("model"), str):
            raise invalid(f"'{directory / 'model.json'}' must name the model: a Hub id or a folder as \"model\"")
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

    def arguments(self, engine: str) -> Mapping[str, Any]:
        rest = {name: value for name, value in self._arguments.items() if name not in _PARAMETERS}
        if engine == "vllm":
            return rest
        rest.pop("enable_lora", None)
        if any(rest.get(name) for name in _SPECULATIVE):
            raise invalid(f"speculative decoding is not supported by engine '{engine}'")
        if rest:
            self.log("INFO", f"model.json: only vLLM itself uses {', '.join(sorted(rest))}; there is no effect here")
        return {}

    def reply(self, request: Request) -> ResponseBuilder:
        try:
            if request.has("embedding_request"):
                raise invalid(f"Model {self._arguments['model']} does not support 'embed' request")
            return super().reply(request)
        except UnknownAdapter as error:
            if not error.known:
                raise invalid("LoRA feature is not enabled.") from None
            raise invalid(f"LoRA {error.name} is not supported, we currently support {list(error.known)}") from None
        except ConchError as error:
            raise ConchError(f"Error generating stream: {error.message}", error.code) from None

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


def _read_object(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise invalid(f"'{path.name}' containing vllm engine args must be provided in '{path.parent}'") from None
    except (OSError, ValueError) as error:
        raise invalid(f"{path} cannot be read: {error}") from None
    if not isinstance(document, dict):
        raise invalid(f"{path} must hold a JSON object")
    return document
