"""Checks of the files and the configuration that a client sends with a load (``--model-load-overrides``).

Files are programs, and a configuration selects the program that runs; only clients that may run code on the server may
send either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from conch.config.complete import RUNTIME_FACT_PREFIX
from conch.config.schema import ModelConfig
from conch.core.errors import invalid

#: Configuration fields that select the code that runs or the files that it loads.
_FIELDS: Final = (
    "backend",
    "platform",
    "runtime",
    "default_model_filename",
    "cc_model_filenames",
    "model_operations",
    "optimization",
)


def check_allowed(allowed: str, config: str | None, files: Mapping[str, Any]) -> None:
    """Raise INVALID_ARG for a load that sends more than ``allowed``: ``files``, ``config`` or ``none``."""
    brings = "files" if files else "a configuration" if config is not None else ""
    if brings and (allowed == "none" or (allowed == "config" and files)):
        raise invalid(
            f"a load may not bring {brings}, as this server has --model-load-overrides={allowed}: load the model by "
            f"its name{' and a configuration' if allowed == 'config' else ''}"
        )


def check_same_code(config: ModelConfig, known: Iterable[ModelConfig]) -> None:
    """Raise INVALID_ARG if a client's ``config`` selects code that no ``known`` configuration selects.

    The known configurations are the one in the repository and the one with which the model serves. All are completed.
    """
    of_server = list(known)
    for field in _FIELDS:
        value = getattr(config, field)
        if value and all(value != getattr(known_config, field) for known_config in of_server):
            raise _chooses_code(field)
    for name, parameter in config.parameters.items():
        if name.startswith(RUNTIME_FACT_PREFIX):
            continue  # shown by the server; without effect in a client's configuration
        if all(
            name not in known_config.parameters or known_config.parameters[name] != parameter
            for known_config in of_server
        ):
            raise _chooses_code(f"parameters['{name[:100]}']")


def _chooses_code(field: str) -> Exception:
    return invalid(
        f"a load's configuration may not set {field} otherwise than the model repository does, as this server has "
        "--model-load-overrides=config: it would choose what code runs"
    )
