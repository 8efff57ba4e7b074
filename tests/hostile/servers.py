"""The servers that are attacked: over a few models of the toy repository, with the flags that the attacks need."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.conftest import STARTERS, Server
from tests.models import build

#: ``identity_fp32`` and ``identity_string`` give back what they get, ``repeat`` answers any number of times,
#: ``generate`` has an interface for ``/generate``.  ``talker`` besides is for the OpenAI API.
MODELS: Final = ("add_sub", "identity_fp32", "identity_string", "repeat", "generate", "generate_shapes")
_FLAGS: Final = ("--model-control-mode=explicit", "--load-model=*")


def start(kind: str, folder: Path) -> Server:
    """``conch`` or ``triton`` over the models, which are made in ``folder``; a context manager."""
    repository = folder / "models"
    build(repository, *MODELS)
    build(repository, "talker", group="openai")
    return STARTERS[kind](repository, *_FLAGS, log=folder / "server.log")
