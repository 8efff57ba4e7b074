"""Restricts the settings of a ``model.json`` in a checkpoint's own folder.

Used by ``Checkpoint.open``. The publisher of a checkpoint may have written any file in its folder. Therefore only
``config.pbtxt`` and the command line can allow the checkpoint's code to run, or other files of the machine to be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from conch.checkpoints.files import GGUF
from conch.checkpoints.hub import MODEL_FILE, local_path, shortened
from conch.core.errors import invalid

#: Files that identify a version directory as a checkpoint's own folder.
_CHECKPOINT: Final = ("config.json", "conch.json")
_SWITCH: Final = "trust_remote_code"
#: Parameters that name files or folders.
_PATHS: Final = ("model", "cache_dir", "chat_template", "speculative_model", "lora_modules")


def is_checkpoint_folder(version_directory: Path) -> bool:
    """Whether the version directory itself contains the files of a checkpoint."""
    return any((version_directory / name).exists() for name in _CHECKPOINT) or any(version_directory.glob(f"*{GGUF}"))


def counted(document: Mapping[str, Any], version_directory: Path) -> tuple[dict[str, Any], str]:
    """Return the effective content of a version's ``model.json``, and a warning about ignored content (empty: none).

    A ``model.json`` outside a checkpoint's folder is unrestricted. Raises INVALID_ARG for one inside a checkpoint's
    folder that names files outside the folder.
    """
    values = dict(document)
    if not (is_checkpoint_folder(version_directory) or _names_own_folder(values.get("model"), version_directory)):
        return values, ""
    for name, text in _named(values):
        if _leads_out(text, version_directory):
            raise invalid(
                f"{version_directory / MODEL_FILE} lies in a checkpoint's folder and may not name a file or folder "
                f"outside of it, as '{name}' does with '{shortened(text)}': set parameter '{name}' in config.pbtxt"
            )
    if _SWITCH not in values:
        return values, ""
    ignored = values.pop(_SWITCH)
    trusts = ignored is True or str(ignored).strip().lower() in ("true", "1", "yes", "on")
    warning = (
        f"'{_SWITCH}' of {version_directory / MODEL_FILE} is ignored, as a checkpoint cannot trust itself: set "
        f"parameter '{_SWITCH}' in config.pbtxt if you trust its code, or serve it with "
        f"'conch serve {version_directory} --trust-remote-code'"
    )
    return values, warning if trusts else ""


def _names_own_folder(model: Any, version_directory: Path) -> bool:
    """Whether ``model`` is the version directory or a path inside it."""
    if not isinstance(model, str) or not model:
        return False
    path = local_path(version_directory, model)
    return path is not None and path.is_relative_to(version_directory.resolve())


def _named(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the parameters that name files, each with its file names."""
    for name in _PATHS:
        value = values.get(name)
        if name == "lora_modules" and isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                continue  # rejected where it is parsed
        for text in value.values() if isinstance(value, dict) else [value]:
            if isinstance(text, str) and text:
                yield name, text


def _leads_out(text: str, version_directory: Path) -> bool:
    """Whether a path leads outside the version directory, or exists only in the model's directory above it."""
    if text.startswith(("/", "~", "$")) or ".." in Path(text).parts:
        return True
    return not (version_directory / text).exists() and (version_directory.parent / text).exists()
