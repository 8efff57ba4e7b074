"""The parameters of a load over the repository API, HTTP or gRPC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from conch.core.errors import invalid


@dataclass(frozen=True, slots=True)
class LoadParameters:
    """The parameters of a load: a configuration (JSON) and files by relative path, in place of the repository's.

    With ``lora_name``, the load is that of a LoRA adapter of the model, at ``lora_path``.
    """

    config: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    lora_name: str = ""
    lora_path: str = ""


#: The parameters of a load of a LoRA adapter.
ADAPTER_PARAMETERS: Final = ("lora_name", "lora_path")


def check_adapter(parameters: Mapping[str, str], *, alone: bool) -> None:
    """Raise INVALID_ARG for parameters of a load that has only some of an adapter, or is not ``alone`` its own."""
    if parameters and not (alone and all(parameters.get(name) for name in ADAPTER_PARAMETERS)):
        raise invalid("the load of a LoRA adapter has the parameters 'lora_name' and 'lora_path', and no others")
