"""The files and requirements of a repository: extras of conch, further packages, and checkpoints on the Hub.

Reads configurations, checkpoints and the imports of Python models; imports no library that runs models. Files that
belong to no model are omitted from the artifact.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.hub import MODEL_DIRECTORY, MODEL_FILE, is_hub_id, local_path, read_model_file
from conch.checkpoints.options import Options, extra_of
from conch.checkpoints.task import canonical
from conch.config.schema import ModelConfig, implementation, is_ensemble
from conch.config.signature import parameters
from conch.core.errors import invalid, not_found
from conch.core.protocol.model_config import ModelInstanceGroup
from conch.core.sampling import TEXT_GENERATION
from conch.machine.extras import PACKAGES
from conch.machine.facts import visible_gpus
from conch.repository.checks.checkpoints import engine_problem
from conch.repository.checks.configuration import named_gpus
from conch.repository.checks.finding import CheckedModel
from conch.repository.checks.missing_imports import packages_of, packages_with
from conch.repository.checks.repository import check
from conch.repository.scan import ModelRepository

#: Names of files and folders that belong to no model.
_LEFT_OUT: Final = (".*", "__pycache__", "*.pyc", "*~", "*.tmp", "*.swp", "*.partial")


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the repository: ``name`` is relative to its root with ``/`` as separator, ``size`` is in bytes.

    ``source`` is None for an empty directory, such as an ensemble's version. ``text`` replaces the content of the file
    in the artifact.
    """

    name: str
    source: Path | None
    size: int = 0
    executable: bool = False
    text: bytes | None = None


@dataclass(frozen=True, slots=True)
class Contents:
    """The entries, sorted by name, and the names of omitted files."""

    entries: tuple[Entry, ...]
    left_out: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """The size of all files (bytes)."""
        return sum(entry.size for entry in self.entries)


def contents(root: Path) -> Contents:
    """List the contents of ``root``.

    A link to a file or a folder of the repository counts as a copy of it. Raises INVALID_ARG for a link out of the
    repository, into itself or to nothing, for a name that is not UTF-8, and for unreadable files.
    """
    left_out: list[str] = []
    try:
        entries = sorted(_below(root, "", root.resolve(), (root.resolve(),), left_out), key=lambda entry: entry.name)
    except OSError as error:
        raise invalid(f"{error.filename or root} cannot be read: {error.strerror}") from None
    return Contents(tuple(entries), tuple(sorted(left_out)))


def _below(folder: Path, prefix: str, root: Path, above: tuple[Path, ...], left_out: list[str]) -> Iterator[Entry]:
    with os.scandir(folder) as listing:
        for item in listing:
            path, name = Path(item.path), f"{prefix}{item.name}"
            if any(fnmatch(item.name, pattern) for pattern in _LEFT_OUT):
                left_out.append(name)
                continue
            try:
                name.encode()
            except UnicodeEncodeError:
                raise invalid(f"{path} cannot be in an artifact, because its name is not UTF-8: rename it") from None
            if item.is_symlink():
                _check_link(path, root, above)
            status = path.stat()
            if stat.S_ISDIR(status.st_mode):
                inner = list(_below(path, f"{name}/", root, (*above, path.resolve()), left_out))
                yield from inner or [Entry(name, None)]
            elif stat.S_ISREG(status.st_mode):
                if not os.access(path, os.R_OK):
                    raise invalid(f"{path} cannot be read: permission denied")
                yield Entry(name, path, status.st_size, bool(status.st_mode & stat.S_IXUSR))
            else:
                left_out.append(name)


def _check_link(link: Path, root: Path, above: tuple[Path, ...]) -> None:
    """Raise INVALID_ARG for a link with a target that cannot be packed in its place."""
    try:
        target = link.resolve(strict=True)
    except (OSError, RuntimeError):
        raise invalid(f"{link} is a broken link: remove it") from None
    if not target.is_relative_to(root):
        raise invalid(f"{link} is a link to {target}, outside of the repository: replace it with a copy (cp -rL)")
    if target in above:
        raise invalid(f"{link} is a link to {target}, which contains it: remove it")


#: Parameters that name a checkpoint, an engine's folder, a tokenizer or an environment.
_PATH_PARAMETERS: Final = ("model", "gpt_model_path", "engine_dir", "tokenizer_dir", "EXECUTION_ENV_PATH")
#: The extra of each backend that runs graphs.
_GRAPHS: Final = {"onnxruntime": "onnxruntime", "openvino": "openvino", "pytorch": "huggingface"}
#: The extras of engines that generate text.
_TEXT: Final = {
    "vllm": ("vllm", "huggingface"),
    "transformers": ("huggingface", "structured"),
    "openvino": ("openvino",),
    "llamacpp": ("llamacpp",),
}
#: Substrings of the names of audio tasks, and of image tasks.
_SOUND: Final = ("audio", "speech")
_IMAGES: Final = ("image", "visual", "video", "object", "depth", "mask", "keypoint", "document")
#: Extras that models use as a whole; a package of another extra is installed alone.
_SERVING: Final = ("huggingface", "llamacpp", "onnxruntime", "openvino", "vllm", "structured", "lora", "audio", "image")
#: Packages in every installation of conch.
_INSTALLED: Final = frozenset({
    "click", "google", "grpc", "hpack", "httptools", "numpy", "orjson", "psutil", "rich", "uvloop",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class RepositoryRequirements:
    """The models of a repository with their configurations, its ensembles, and their requirements; all sorted.

    ``extras`` are conch's, ``packages`` are further packages for pip, and ``hub`` are the ids of checkpoints that the
    server downloads from the Hugging Face Hub at startup. ``writers`` are language models with the input
    ``text_input``. ``tasks`` are the tasks of checkpoints by model, if the files tell them. ``lacking`` lists what
    this machine lacks to serve the models.
    """

    configs: Mapping[str, ModelConfig]
    ensembles: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    hub: tuple[str, ...] = ()
    writers: tuple[str, ...] = ()
    tasks: Mapping[str, str] = field(default_factory=dict)
    lacking: tuple[str, ...] = ()

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the models."""
        return tuple(self.configs)

    def chosen(self, name: str) -> str:
        """Return the model for a platform's requests: ``name``, else the only model, else the only ensemble.

        Raises NOT_FOUND for an unknown name, INVALID_ARG if a name is required.
        """
        if name and name not in self.models:
            raise not_found(f"there is no model '{name}' in the repository, which has {', '.join(self.models)}")
        if name or len(self.models) == 1:
            return name or self.models[0]
        if len(self.ensembles) == 1:
            return self.ensembles[0]
        raise invalid(f"the repository has several models ({', '.join(self.models)}): choose one with --model")


@dataclass
class _Requirements:
    """The requirements of the models that have been read so far."""

    extras: set[str] = field(default_factory=set)
    packages: set[str] = field(default_factory=set)
    hub: set[str] = field(default_factory=set)
    writers: set[str] = field(default_factory=set)
    tasks: dict[str, str] = field(default_factory=dict)
    lacking: set[str] = field(default_factory=set)

    def add_engine(self, engine: str, *, gguf: bool = False) -> None:
        """Add an engine that serves a model to ``lacking`` if it is not installed here."""
        problem, command = engine_problem(engine, gguf=gguf)
        if problem:
            self.lacking.add(f"engine '{engine}' is not installed here ({command})")


def read_requirements(root: Path, mount: str) -> RepositoryRequirements:
    """Return the requirements of the repository at ``root``, whose files the platform puts below ``mount``.

    Raises INVALID_ARG if ``conch check`` finds errors, if there are no models, and if a model uses files elsewhere that
    the platform would not have.
    """
    errors = [finding for finding in check([root]) if finding.severity == "error"]
    if errors:
        more = f" (and {len(errors) - 1} more: conch check {root})" if len(errors) > 1 else ""
        raise invalid(f"the repository has errors: {errors[0]}{more}")
    required, ensembles = _Requirements(), []
    configs: dict[str, ModelConfig] = {}
    repository = ModelRepository([root])
    for name in repository.names():
        files = repository.describe(name)
        model = CheckedModel(files, files.completed(named_gpus(files.config)))
        configs[name] = model.config
        if is_ensemble(model.config):
            ensembles.append(name)
            continue
        _check_paths(model, root.resolve(), mount)
        _add(model, required)
        if _needs_gpu(files.config) and not visible_gpus():
            required.lacking.add(f"model '{name}' runs on a GPU, but this machine has none")
    if not configs:
        raise invalid(f"there are no models in {root}")
    return RepositoryRequirements(
        configs,
        tuple(ensembles),
        tuple(sorted(required.extras)),
        tuple(sorted(required.packages)),
        tuple(sorted(required.hub)),
        tuple(sorted(required.writers)),
        required.tasks,
        tuple(sorted(required.lacking)),
    )


def _needs_gpu(config: ModelConfig) -> bool:
    """Whether the configuration, as written, requires a GPU; KIND_AUTO uses one only if there is one."""
    return any(group.kind == ModelInstanceGroup.KIND_GPU for group in config.instance_group)


def _check_paths(model: CheckedModel, root: Path, mount: str) -> None:
    """Raise INVALID_ARG for a parameter that names a file or a folder outside of the repository."""
    for version in model.versions:
        directory = model.files.version_directory(version)
        for key, value in {**_document(directory), **parameters(model.config)}.items():
            if key not in _PATH_PARAMETERS or not isinstance(value, str) or not value:
                continue
            if Path(value).is_relative_to(mount):
                continue
            if _is_outside(value.replace(MODEL_DIRECTORY, str(model.files.directory)), directory, root):
                raise invalid(
                    f"model '{model.files.name}': '{key}' names {value}, which is not in the repository, so the "
                    f"platform would not have it: put it into {directory}, and name it from there"
                )


def _is_outside(named: str, version_directory: Path, root: Path) -> bool:
    """Return whether a parameter names an existing file or folder outside of ``root``."""
    with suppress(OSError, RuntimeError):  # an invalid file name, or a missing home directory
        path = Path(named).expanduser()
        for candidate in (version_directory / path, version_directory.parent / path):
            if candidate.exists():
                return not candidate.resolve().is_relative_to(root)
    return False


def _add(model: CheckedModel, required: _Requirements) -> None:
    backend = model.config.backend
    if implementation(model.config) == "python":
        modules = packages_of(model) - _INSTALLED
        required.packages |= packages_with(modules - PACKAGES.keys())
        for package in map(PACKAGES.__getitem__, modules & PACKAGES.keys()):
            if package.extras and package.extras[0] in _SERVING:
                required.extras.add(package.extras[0])
            else:
                required.packages.add(package.name)
    elif backend in _GRAPHS:
        required.extras.add(_GRAPHS[backend])
        required.add_engine(backend)
    elif backend == "vllm":
        required.extras.update(_TEXT["vllm"])
        required.add_engine("vllm")
        required.writers.add(model.files.name)
        required.hub.update(_hub_ids(model))
    elif backend == "tensorrtllm":
        required.extras.update(_TEXT["transformers"])
        required.add_engine("transformers")
    elif backend == "huggingface":
        required.hub.update(_hub_ids(model))
        overrides = Options.from_values(parameters(model.config))
        for version in model.versions:
            extras, engine, task, gguf = _of_checkpoint(model.files.version_directory(version), overrides)
            required.add_engine(engine if engine != "auto" else "transformers", gguf=gguf)
            required.extras.update(extras)
            if task:
                required.tasks[model.files.name] = canonical(task)
            if task == TEXT_GENERATION:
                required.writers.add(model.files.name)


def _hub_ids(model: CheckedModel) -> Iterator[str]:
    for version in model.versions:
        directory = model.files.version_directory(version)
        named = parameters(model.config).get("model") or _document(directory).get("model")
        if isinstance(named, str) and is_hub_id(named) and local_path(directory, named) is None:
            yield named


def _of_checkpoint(directory: Path, overrides: Options) -> tuple[set[str], str, str, bool]:
    """Return the extras for a checkpoint, its engine, its task, and whether it is a GGUF file.

    For a checkpoint on the Hub, only its options are known.
    """
    document = _document(directory)
    options = overrides.over(document)
    engine, task, gguf = options.engine, options.task, ":" in options.model
    media: tuple[str, ...] = ()
    if not options.model or local_path(directory, options.model) is not None:
        checkpoint = Checkpoint.open(directory, overrides, model_file=document)
        engine, task, gguf = checkpoint.engine, checkpoint.task, checkpoint.gguf is not None
        media = checkpoint.media_extras
    extras = {extra_of(engine), *(_TEXT.get(engine, ()) if task in ("", TEXT_GENERATION) else ())}
    if any(part in task for part in _SOUND):
        extras.add("audio")
    elif any(part in task for part in _IMAGES):
        extras.add("image")
    extras.update(media)
    if options.adapters and engine != "llamacpp":
        extras.add("lora")
    return extras, engine, task, gguf


def _document(directory: Path) -> dict[str, Any]:
    return read_model_file(directory) if (directory / MODEL_FILE).is_file() else {}
