"""What a client's load may bring: files, a configuration, or nothing but the model's name (``--model-load-overrides``).

Files are programs, and a configuration chooses which program runs; both are for whoever may run code on the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from conch.config.complete import RUNTIME_FACT_PREFIX
from conch.config.schema import ModelConfig
from conch.errors import invalid

#: The fields of a configuration that say which code runs, or what it loads.
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
    """Raise INVALID_ARG for a load that brings more than ``allowed``: ``files``, ``config`` or ``none``."""
    brings = "files" if files else "a configuration" if config is not None else ""
    if brings and (allowed == "none" or (allowed == "config" and files)):
        raise invalid(
            f"a load may not bring {brings}, as this server has --model-load-overrides={allowed}: load the model by "
            f"its name{' and a configuration' if allowed == 'config' else ''}"
        )


def check_same_code(config: ModelConfig, known: Iterable[ModelConfig]) -> None:
    """Raise INVALID_ARG where ``config``, a client's, makes other code run than one of the ``known`` does.

    All of them are completed; known are the repository's configuration, and the one with which the model serves.
    """
    of_server = list(known)
    for field in _FIELDS:
        value = getattr(config, field)
        if value and all(value != getattr(one, field) for one in of_server):
            raise _chooses_code(field)
    for name, parameter in config.parameters.items():
        if name.startswith(RUNTIME_FACT_PREFIX):
            continue  # shown by the server, and without effect when it is given back
        if all(name not in one.parameters or one.parameters[name] != parameter for one in of_server):
            raise _chooses_code(f"parameters['{name[:100]}']")


def _chooses_code(field: str) -> Exception:
    return invalid(
        f"a load's configuration may not set {field} otherwise than the model repository does, as this server has "
        "--model-load-overrides=config: it would choose what code runs"
    )
