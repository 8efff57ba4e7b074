"""Reads the files with the initial states of sequences. Called by the loader, in a thread."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Final

from conch.config.reading import read_small
from conch.config.schema import ModelConfig, datatype
from conch.core.errors import internal, invalid
from conch.core.tensors import ELEMENT_SIZE
from conch.server.schedulers.sequences.inputs import StateTensor, state_tensors

#: Folder of the files in a model's directory.
FOLDER: Final = "initial_state"
#: Maximum size of a file (bytes).
_MOST_BYTES: Final = 1 << 30


def read_states(config: ModelConfig, directory: Path) -> tuple[StateTensor, ...]:
    """Return the states of sequences, with initial values, of the model in ``directory``.

    Raises INVALID_ARG if a file is too small, INTERNAL if a file cannot be read.
    """
    files = {
        state.input_name: _read(initial, directory)
        for state in config.sequence_batching.state
        for initial in state.initial_state
        if initial.WhichOneof("state_data") == "data_file"
    }
    return state_tensors(config, files)


def _read(initial: object, directory: Path) -> bytes:
    file: str = initial.data_file  # type: ignore[attr-defined]
    folder = (directory / FOLDER).resolve()
    path = (folder / file).resolve()
    if not path.is_relative_to(folder):
        raise internal(f"initial state file '{file}' must be inside the folder '{FOLDER}' of the model")
    try:
        data = read_small(path, _MOST_BYTES)
    except OSError as error:
        raise internal(f"failed to read initial state file '{file}': {error.strerror}") from error
    kind = datatype(initial.data_type)  # type: ignore[attr-defined]
    if kind == "BYTES":
        return data
    expected = ELEMENT_SIZE[kind] * prod(initial.dims)  # type: ignore[attr-defined]
    if len(data) < expected:
        raise invalid(
            f"initial_state setting expects {expected} bytes, but the data provided from {file}only has {len(data)} "
            "bytes."
        )
    return data[:expected]
