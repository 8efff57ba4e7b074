"""Checks of the files that a configuration names: labels, warm-up data, initial states, an environment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tarfile import is_tarfile

from conch.checks.finding import Finding
from conch.checks.model import CheckedModel
from conch.config.problem import Problem
from conch.config.signature import parameters
from conch.errors import ConchError
from conch.repository.model_files import read_labels


def check_side_files(model: CheckedModel) -> Iterator[Finding]:
    """Files that the configuration names and that are missing or cannot be read."""
    for problem in _problems(model):
        problem.hint = problem.hint or "put the file there, or leave the field out"
        yield model.finding(problem)


def _problems(model: CheckedModel) -> Iterator[Problem]:
    directory, config = model.files.directory, model.config
    for index, output in enumerate(config.output):
        if output.label_filename:
            labels = directory / output.label_filename
            if labels.exists() and not labels.is_file():
                yield Problem(f"label file {labels}: it is no regular file", ("output", index, "label_filename"))
                continue
            try:
                read_labels(directory, output.label_filename)
            except ConchError as error:
                yield Problem(error.message, ("output", index, "label_filename"))
    for index, sample in enumerate(config.model_warmup):
        for name in sorted(sample.inputs):
            source = sample.inputs[name].input_data_file
            if source and not (directory / "warmup" / source).is_file():
                wanted = directory / "warmup" / source
                where = ("model_warmup", index, "inputs")
                yield Problem(f"warmup input '{name}' needs {wanted}, which is missing", where)
    for index, state in enumerate(config.sequence_batching.state):
        for initial in state.initial_state:
            wanted = directory / "initial_state" / initial.data_file
            if initial.data_file and not wanted.is_file():
                field = ("sequence_batching", 0, "state", index, "initial_state")
                yield Problem(f"initial state '{initial.name}' needs {wanted}, which is missing", field)
    environment = parameters(config).get("EXECUTION_ENV_PATH", "")
    if environment:
        path = Path(environment.replace("$$TRITON_MODEL_DIRECTORY", str(directory)))
        if not path.exists():
            yield Problem(f"EXECUTION_ENV_PATH names {path}, which is missing", ("parameters",))
        elif path.is_dir() and not all((path / "bin" / name).exists() for name in ("activate", "python")):
            problem = f"EXECUTION_ENV_PATH names {path}, which has no bin/activate and bin/python"
            yield Problem(problem, ("parameters",), hint=f"python -m venv {path}, or a conda-pack archive")
        elif path.is_file() and not is_tarfile(path):
            problem = f"EXECUTION_ENV_PATH names {path}, which is no archive"
            yield Problem(problem, ("parameters",), hint="name a folder, or an archive that conda-pack made")
