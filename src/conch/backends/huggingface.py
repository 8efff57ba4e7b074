"""The backend ``huggingface``: its parameters, and the choice of the implementation for a checkpoint.

Checkpoints that generate text use ``TextBackend``, all others ``HuggingFaceBackend``. Runs in workers, which find it
through ``table.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from conch.backends.base.backend import BackendBase
from conch.backends.generation.model_parameters import GENERATION_PARAMETERS
from conch.backends.tasks.parameters import TASK_PARAMETERS
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.hub import MODEL_FILE, read_model_file
from conch.checkpoints.options import CHECKPOINT_PARAMETERS, Options
from conch.config.parameters import ParameterTable
from conch.core.errors import ConchError
from conch.core.sampling import TEXT_GENERATION
from conch.workers.child.channel import Channel, Header

PARAMETERS: Final = ParameterTable(
    "huggingface", (*CHECKPOINT_PARAMETERS, *TASK_PARAMETERS, *GENERATION_PARAMETERS), strict=True
)


def open_huggingface(channel: Channel, init: Header) -> BackendBase:
    """Create the backend for the checkpoint of a model.

    Raises INVALID_ARG for an unknown parameter, and the errors of :meth:`Checkpoint.open`.
    """
    config = json.loads(init["config"])
    directory = Path(init["model"]["version_directory"])
    PARAMETERS.check(config.get("parameters") or ())
    document = read_model_file(directory)
    try:
        PARAMETERS.check(document)
    except ConchError as error:
        raise ConchError(f"{directory / MODEL_FILE}: {error.message}", error.code) from None
    checkpoint = Checkpoint.open(directory, Options.from_config(config), model_file=document)
    if checkpoint.task == TEXT_GENERATION:
        from conch.backends.io_formats.text.backend import TextBackend

        return TextBackend(channel, init, checkpoint)
    from conch.backends.tasks.backend import HuggingFaceBackend

    return HuggingFaceBackend(channel, init, checkpoint)
