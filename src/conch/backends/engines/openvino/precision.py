"""The number formats of the engine ``openvino``, and the size of its KV cache. Runs in workers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from conch.backends.generation.engine import EngineSpec
from conch.core.errors import invalid
from conch.machine.facts import usable_cores
from conch.machine.memory import free_memory

#: Tokens per block of the KV cache; fixed in OpenVINO's CPU plug-in.
BLOCK: Final = 32
#: The default cache holds this many tokens per sequence, limited to 1 / ``PART_OF_MEMORY`` of the free memory.
TOKENS_EACH: Final = 4096
PART_OF_MEMORY: Final = 8
_QUANTISED: Final = re.compile(rb'element_type="[iu][48]"')


@dataclass(frozen=True, slots=True)
class Precision:
    """Number formats with OpenVINO's names; ``exact`` disables quantised activations."""

    arithmetic: str
    cache: str
    exact: bool = False

    @classmethod
    def of(cls, spec: EngineSpec, capabilities: tuple[str, ...]) -> Precision:
        """Choose the formats for ``spec.dtype`` on a CPU with these ``capabilities`` (OpenVINO's names).

        With ``auto``, quantised weights are multiplied in int8, which decodes small batches 1.5 times as fast as bf16,
        even with AMX, and agrees with float32 about as often. Other weights use bf16 if the CPU supports it. The cache
        has 16 bits per number, with which greedy tokens equalled those of float32; with OpenVINO's default of 8 bits
        they did not. Raises INVALID_ARG for an unsupported dtype.
        """
        if spec.dtype == "float32":
            return cls("f32", "f32", exact=True)
        if spec.dtype == "bfloat16":
            if "BF16" not in capabilities:
                raise invalid("dtype 'bfloat16' is not supported by this CPU")
            return cls("bf16", "bf16")
        if spec.dtype != "auto":
            raise invalid(f"dtype '{spec.dtype}': engine 'openvino' computes in float32 or bfloat16")
        if "BF16" in capabilities and not quantised(spec):
            return cls("bf16", "bf16")
        return cls("f32", "f16")

    def properties(self, threads: int) -> dict[str, Any]:
        """Return OpenVINO's properties for compiling a model; 0 ``threads`` means all usable cores."""
        chosen = {
            "INFERENCE_PRECISION_HINT": self.arithmetic,
            "KV_CACHE_PRECISION": self.cache,
            "INFERENCE_NUM_THREADS": threads or usable_cores(),
            # Pinned threads of two models, or of a model and the server, would compete for the same cores.
            "ENABLE_CPU_PINNING": False,
        }
        return {**chosen, "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0} if self.exact else chosen


def quantised(spec: EngineSpec) -> bool:
    """Whether the weights have fewer than 16 bits per number."""
    if spec.gguf is not None:
        return spec.gguf.quantised
    return _QUANTISED.search((spec.directory / "openvino_model.xml").read_bytes()) is not None


def cache_blocks(spec: EngineSpec, token_bytes: int, sequences: int, context: int) -> int:
    """Return the number of blocks in the KV cache, for tokens of ``token_bytes``.

    ``context`` is the length limit of a sequence (tokens).
    """
    if spec.cache_tokens:
        return max(1, spec.cache_tokens // BLOCK)
    sequence_tokens = min(context, TOKENS_EACH)
    free = free_memory().available
    fitting = free // PART_OF_MEMORY // token_bytes
    return -(-max(sequence_tokens, min(sequences * sequence_tokens, fitting)) // BLOCK)


def capabilities() -> tuple[str, ...]:
    """Return OpenVINO's names of the number formats that the CPU supports."""
    import openvino

    core: Any = openvino.Core()
    return tuple(map(str, core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")))
