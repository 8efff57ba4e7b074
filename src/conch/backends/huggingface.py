"""Which implementation a checkpoint of the backend ``huggingface`` gets: one that batches, or one that generates.

Called in workers, which the server tells of it by ``table.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

from conch.backends.native.backend import NativeBackend
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.workers.child.channel import Channel, Header


def open_huggingface(channel: Channel, init: Header) -> NativeBackend:
    """The backend for the checkpoint of a model.  Raises as :meth:`Checkpoint.open` does."""
    options = Options.from_config(json.loads(init["config"]))
    checkpoint = Checkpoint.open(Path(init["model"]["version_directory"]), options)
    if checkpoint.task == "text-generation":
        from conch.backends.contracts.text.backend import TextBackend

        return TextBackend(channel, init, checkpoint)
    from conch.backends.tasks.backend import HuggingFaceBackend

    return HuggingFaceBackend(channel, init, checkpoint)
