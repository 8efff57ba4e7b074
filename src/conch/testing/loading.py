"""From a model's directory to a model that a test can call: as the server loads one, but in this process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from conch.backends.table import backend_of
from conch.config.schema import ModelConfig, copied, implementation
from conch.config.signature import parameters as parameters_of
from conch.config.validate import check_directory_name, validate
from conch.errors import invalid, not_found, unsupported
from conch.repository.model_files import ModelFiles, describe
from conch.repository.versions import select_versions
from conch.server.devices import visible_gpus
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
    """Load the model in the directory ``path`` and initialise it; leave it as a context manager, or close it.

    ``models`` are functions that stand for other models, by name: they get inputs as arrays by name and return outputs
    by name, or any number of such where they are called as decoupled models; another loaded model will do.
    ``parameters`` go before those of the configuration, ``version`` before its policy.  ``timeout`` is how long a
    response may be waited for (s) after ``execute`` has returned.

    Raises what the model raises, and :class:`conch.errors.ConchError` for what the server would not load.
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
    """The configuration before the model has completed it."""
    written = copied(files.config)
    for name, value in parameters.items():
        if not isinstance(value, str):
            raise invalid(f"parameter '{name}' of a model is a text, as in its config.pbtxt; got {value!r:.80}")
        written.parameters[name].string_value = value
    config = files.completed(visible_gpus(), written)
    validate(config)
    check_directory_name(config, files.name)
    if config.HasField("ensemble_scheduling"):
        raise unsupported(f"model '{files.name}' is an ensemble, which has no code: test its members")
    if backend_of(implementation(config), parameters_of(config)).generates:
        raise unsupported(f"model '{files.name}' generates text between requests: test it with a server")
    return config
