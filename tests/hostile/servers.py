"""Starts the attacked servers, with a few models of the toy repository and the flags that the attacks need."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.conftest import STARTERS, Server
from tests.models import build

#: ``identity_fp32`` and ``identity_string`` return their input, ``repeat`` sends any number of responses, ``generate``
#: has an interface for ``/generate``. In addition, ``talker`` is for the OpenAI API.
MODELS: Final = ("add_sub", "identity_fp32", "identity_string", "repeat", "generate", "generate_shapes")
FLAGS: Final = ("--model-control-mode=explicit", "--load-model=*")


def write_models(repository: Path) -> None:
    """Write the models to ``repository``."""
    build(repository, *MODELS)
    build(repository, "talker", group="openai")


def start(kind: str, folder: Path) -> Server:
    """Return a context manager that runs ``conch`` or ``triton`` with the models, which are written to ``folder``."""
    write_models(folder / "models")
    return STARTERS[kind](folder / "models", *FLAGS, log=folder / "server.log")
