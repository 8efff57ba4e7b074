"""The extensions of the protocol that this server has, as its metadata and its log name them."""

from __future__ import annotations

from typing import Final

from conch import __version__

#: In Triton's order; the last one tells gRPC clients conch's version,
#: for which the message has no field.
EXTENSIONS: Final = (
    "classification", "sequence", "model_repository", "model_repository(unload_dependents)", "schedule_policy",
    "model_configuration", "system_shared_memory", "cuda_shared_memory", "binary_tensor_data", "parameters",
    "statistics", "trace", "logging", f"conch({__version__})",
)  # fmt: skip
