"""The protocol extensions of this server, as listed in its metadata and log."""

from __future__ import annotations

from typing import Final

from conch import __version__

#: In Triton's order. The last entry reports conch's version to gRPC clients, because the message has no field for it.
EXTENSIONS: Final = (
    "classification", "sequence", "model_repository", "model_repository(unload_dependents)", "schedule_policy",
    "model_configuration", "system_shared_memory", "cuda_shared_memory", "binary_tensor_data", "parameters",
    "statistics", "trace", "logging", f"conch({__version__})",
)  # fmt: skip
