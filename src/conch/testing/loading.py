"""Loads a model's directory in the test's process, as the server does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from conch.backends.table import backend_of
from conch.config.schema import ModelConfig, copied, implementation
from conch.config.signature import parameters as parameters_of
from conch.config.validate import check_directory_name, validate
from conch.core.errors import invalid, not_found, unsupported
from conch.machine.facts import visible_gpus
from conch.repository.model_files import ModelFiles, describe
from conch.repository.versions import select_versions
from conch.testing.fakes import FakeModel
from conch.testing.model import ModelUnderTest


def load(
    path: str | os.PathLike[str],
    *,
    models: Mapping[str, FakeModel] | None = None,
    parameters: Mapping[str, str] | None = None,
    version: int | None = None,
    timeout: float = 60.0,
) -> ModelUnderTest:
    """Load the model in the directory ``path`` and initialize it; use as a context manager, or close it.

    ``models`` are functions that stand in for other models, by name. They get inputs as arrays by name and return
    outputs by name, or any number of such mappings if called as decoupled models; another loaded model works too.
    ``parameters`` override the configuration's parameters, ``version`` overrides its version policy. ``timeout`` limits
    the wait for a response (s) after ``execute`` has returned.

    Raises the model's exceptions, and :class:`conch.core.errors.ConchError` for a model that the server would not load.
    """
    directory = Path(path).resolve()
    if not directory.is_dir():
        raise not_found(f"there is no model at {directory}: give its directory, which has a version such as '1' in it")
    files = describe(directory.name, directory)
    config = _configured(files, parameters or {})
    if version is None:
        selected = select_versions(config, files.versions).versions
        if not selected:
            raise invalid(f"at least one version must be available under the version policy of model '{files.name}'")
        version = selected[-1]
    return ModelUnderTest(files, version, config, models or {}, timeout)


def _configured(files: ModelFiles, parameters: Mapping[str, str]) -> ModelConfig:
    """Return the configuration before the model completes it."""
    written = copied(files.config)
    for name, value in parameters.items():
        if not isinstance(value, str):
            raise invalid(f"parameter '{name}' of a model is a text, as in its config.pbtxt; got {value!r:.80}")
        written.parameters[name].string_value = value
    config = files.completed(visible_gpus(), written)
    validate(config)
    check_directory_name(config, files.name)
    if config.HasField("ensemble_scheduling"):
        raise unsupported(f"model '{files.name}' is an ensemble, which has no code: test the models of its steps")
    if backend_of(implementation(config), parameters_of(config)).generates:
        raise unsupported(f"model '{files.name}' generates text between requests: test it with a server")
    return config
