"""A configuration's parameters as PyTorch's settings; names and meanings are those of Triton's PyTorch backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from conch.config.parameters import Parameter, ParameterTable
from conch.errors import invalid

_BOOLEANS: Final = "`true`, `false`"

PARAMETERS: Final = ParameterTable(
    "pytorch",
    (
        Parameter("INFERENCE_MODE", _BOOLEANS, "`true`", "run under `torch.inference_mode`, else `torch.no_grad`"),
        Parameter(
            "DISABLE_OPTIMIZED_EXECUTION",
            _BOOLEANS,
            "`false`",
            "run TorchScript without optimising it at the first runs",
        ),
        Parameter(
            "INTRA_OP_THREAD_COUNT",
            "threads",
            "the usable cores, shared by the instances",
            "how many cores compute an operator",
        ),
        Parameter("INTER_OP_THREAD_COUNT", "threads", "PyTorch's", "size of the pool that runs what TorchScript forks"),
        Parameter("ENABLE_JIT_EXECUTOR", _BOOLEANS, "PyTorch's", "TorchScript's profiling executor"),
        Parameter("ENABLE_JIT_PROFILING", _BOOLEANS, "PyTorch's", "its profiling"),
        Parameter("ENABLE_TENSOR_FUSER", _BOOLEANS, "PyTorch's", "its fuser"),
        Parameter("ENABLE_CACHE_CLEANING", _BOOLEANS, "`false`", "give a GPU's cached memory back after each run"),
    ),
    # Instances share weights anyway; NvFuser is no part of PyTorch any more.
    accepted=frozenset({"ENABLE_WEIGHT_SHARING", "ENABLE_NVFUSER"}),
)


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """How a program runs; ``None`` leaves PyTorch's own choice."""

    inference_mode: bool = True
    optimized: bool = True
    threads: int = 0
    inter_op_threads: int = 0
    jit_executor: bool | None = None
    jit_profiling: bool | None = None
    tensor_fuser: bool | None = None
    cache_cleaning: bool = False


def torch_settings(config: Mapping[str, Any]) -> TorchSettings:
    """The settings that a configuration's parameters ask for.  Raises INVALID_ARG for a value that has no meaning."""
    given = {name: one.get("string_value", "") for name, one in config.get("parameters", {}).items()}
    return TorchSettings(
        inference_mode=_flag(given, "INFERENCE_MODE", True),
        optimized=not _flag(given, "DISABLE_OPTIMIZED_EXECUTION", False),
        threads=_count(given, "INTRA_OP_THREAD_COUNT"),
        inter_op_threads=_count(given, "INTER_OP_THREAD_COUNT"),
        jit_executor=_choice(given, "ENABLE_JIT_EXECUTOR"),
        jit_profiling=_choice(given, "ENABLE_JIT_PROFILING"),
        tensor_fuser=_choice(given, "ENABLE_TENSOR_FUSER"),
        cache_cleaning=_flag(given, "ENABLE_CACHE_CLEANING", False),
    )


def _flag(given: Mapping[str, str], name: str, default: bool) -> bool:
    chosen = _choice(given, name)
    return default if chosen is None else chosen


def _choice(given: Mapping[str, str], name: str) -> bool | None:
    if name not in given:
        return None
    value = given[name].lower()
    if value not in ("true", "false", "1", "0"):
        raise invalid(f"failed to convert {name} '{given[name]}' to boolean value: it must be true or false")
    return value in ("true", "1")


def _count(given: Mapping[str, str], name: str) -> int:
    text = given.get(name, "0")
    if not text.isdecimal() or int(text) >= 1 << 31:
        raise invalid(f"failed to convert {name} '{text}' to integral number: it must be a number of threads")
    return int(text)
