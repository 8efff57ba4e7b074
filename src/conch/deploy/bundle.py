"""The content of a deployment, and writing it: the artifact with the repository, and the files beside it.

The files are templates with placeholders ``@{name}``, because shells and Terraform use ``$``. Container files are
``deploy/container/Containerfile`` with the additions that a platform requires.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from errno import ENOTEMPTY
from importlib.resources import files
from math import prod
from pathlib import Path
from shutil import disk_usage, rmtree
from tempfile import mkdtemp
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import quote

from conch.checkpoints.hub import MODEL_DIRECTORY, MODEL_FILE, read_model_file
from conch.checkpoints.manifest import FILENAME, Manifest
from conch.checkpoints.options import Options, files_for
from conch.config.schema import ModelConfig
from conch.config.signature import full_shape, parameters, signature
from conch.core.errors import Code, ConchError, invalid
from conch.core.protocol.model_config import ModelInstanceGroup
from conch.core.sampling import TEXT_GENERATION
from conch.deploy.requirements import Contents, RepositoryRequirements, contents, read_requirements
from conch.deploy.trial import Runner, try_artifact

#: Endpoints of a single model, and all endpoints.
ModelEndpoint = Literal["infer", "generate", "generate_stream"]
Endpoint = Literal[ModelEndpoint, "openai"]
#: The variant of ``openai`` for embedding models.
EMBEDDINGS: Final = "openai_embeddings"
_OPENAI: Final[Mapping[str, str]] = {"openai": "/v1/chat/completions", EMBEDDINGS: "/v1/embeddings"}
_TASKS: Final[Mapping[str, str]] = {"": "openai", TEXT_GENERATION: "openai", "feature-extraction": EMBEDDINGS}


def endpoint_for(endpoint: str, model: str, task: str) -> str:
    """Resolve an ``Endpoint`` for a model's ``task``, which is empty if unknown.

    Raises INVALID_ARG for ``openai`` if the OpenAI API does not support the task.
    """
    if endpoint != "openai":
        return endpoint
    if task not in _TASKS:
        raise invalid(
            f"the OpenAI API has no endpoint for the task '{task}' of model '{model}': choose another --endpoint"
        )
    return _TASKS[task]


def path_of(endpoint: str, model: str) -> str:
    """Return the path of an endpoint for a model; paths of the OpenAI API do not depend on the model."""
    return _OPENAI.get(endpoint) or f"/v2/models/{quote(model, safe='')}/{endpoint}"


_SIZES: Final = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))

_PLACEHOLDER: Final = re.compile(r"@\{(\w+)\}")


def render(template: str, /, **values: object) -> str:
    """Fill in the template ``template`` of ``templates/``. Raises KeyError for a missing value."""
    text = (files("conch.deploy") / "templates" / template).read_text(encoding="utf-8")
    return _PLACEHOLDER.sub(lambda match: str(values[match[1]]), text)


def shown(size: int) -> str:
    """Format a size (bytes) in decimal units, as in the platforms' limits."""
    for unit, name in _SIZES:
        if size >= 0.9995 * unit:  # 999.6 kB are 1 MB with three digits
            return f"{size / unit:.3g} {name}"
    return f"{size} bytes"


#: The folder for checkpoints from the Hub, which every user may write to.
HUB_CACHE: Final = "/tmp/huggingface"
_PACKAGES: Final = """
# Packages that the Python models import; conch's image has no pip.
FROM python:${{PYTHON}}-slim AS packages
COPY --from=conch /opt/conch /opt/conch
RUN python -m pip --python /opt/conch/bin/python install --no-cache-dir --disable-pip-version-check \\
    {packages}
"""


def containerfile(platform: str, requirements: RepositoryRequirements, steps: Iterable[str]) -> str:
    """Return the container file, with the platform's ``steps`` (instructions and comments) at the end."""
    lines = [
        f"# conch on {platform}.  Build the base image in a checkout of conch:",
        "#",
        *(f"#     {line}" for line in base_commands(requirements)),
    ]
    if requirements.hub:
        lines += [
            "#",
            f"# The server downloads {', '.join(requirements.hub)} when it starts, into {HUB_CACHE},",
            "# unless the files are in the image already.",
        ]
    lines += ["ARG CONCH=conch", *(["ARG PYTHON=3.12"] if requirements.packages else []), "FROM ${CONCH} AS conch"]
    if requirements.packages:
        lines += _PACKAGES.format(
            packages=" ".join(shlex.quote(package) for package in requirements.packages)
        ).splitlines()
    lines += ["", "FROM conch"]
    if requirements.packages:
        lines.append("COPY --from=packages /opt/conch /opt/conch")
    return "\n".join([*lines, f"ENV HF_HOME={HUB_CACHE}", *steps]) + "\n"


def base_commands(requirements: RepositoryRequirements) -> list[str]:
    """Return the commands that build the base image of a container file."""
    extras = f" --build-arg EXTRAS={','.join(requirements.extras)}" if requirements.extras else ""
    return ["make wheel", f"docker build -f deploy/container/Containerfile{extras} -t conch ."]


def words(command: Sequence[str]) -> str:
    """Return a command as a list in the syntax of container files, JSON and Terraform."""
    return json.dumps(list(command))


_TEXT: Final = "What is a conch?"
#: The inputs of a model whose configuration is completed at load: those of a checkpoint.
_UNKNOWN: Final = (("text_input", "BYTES", (1, 1)),)


def example(config: ModelConfig, endpoint: str, model: str, writes: bool = False) -> str:
    """Return the body, as JSON, of a request to an endpoint of ``endpoint_for``; variable dimensions are 1.

    ``writes`` means that the model is a language model, whose configuration may have no inputs.
    """
    if endpoint == "openai":
        return json.dumps({"model": model, "messages": [{"role": "user", "content": _TEXT}]})
    if endpoint == EMBEDDINGS:
        return json.dumps({"model": model, "input": [_TEXT]})
    declared = signature(config, 1).inputs
    inputs = [
        (tensor.name, tensor.datatype, tuple(max(size, 1) for size in full_shape(config, tensor.dims)))
        for tensor in declared.values()
        if not tensor.optional
    ] or _UNKNOWN
    if endpoint == "infer":
        tensors = [
            {"name": name, "datatype": datatype, "shape": list(shape), "data": [_element(datatype)] * prod(shape)}
            for name, datatype, shape in inputs
        ]
        return json.dumps({"inputs": tensors})
    values: dict[str, Any] = {
        name: _element(datatype) if prod(shape) == 1 else [_element(datatype)] * prod(shape)
        for name, datatype, shape in inputs
    }
    if endpoint == "generate_stream" and (writes or "stream" in declared):
        values["stream"] = True  # without it, the whole text is one response
    return json.dumps(values)


def _element(datatype: str) -> Any:
    if datatype == "BYTES":
        return _TEXT
    if datatype == "BOOL":
        return False
    return 0.0 if datatype.startswith(("FP", "BF")) else 0


def check_output(out: Path, repository: Path) -> None:
    """Raise ALREADY_EXISTS if ``out`` is not empty, INVALID_ARG if it cannot be created."""
    if out.resolve().is_relative_to(repository.resolve()):
        raise invalid(f"{out} is in the model repository, where it would be taken for a model: choose another folder")
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            problem = "exists and is not empty" if out.is_dir() else "exists and is not a folder"
            raise ConchError(f"{out} {problem}: choose another folder", Code.ALREADY_EXISTS)
        if out.is_symlink() and not out.exists():
            raise invalid(f"{out} is a broken link: remove it")
    except OSError as error:
        raise invalid(f"{out} cannot be written: {error.strerror}") from None
    if not out.absolute().parent.is_dir():
        raise invalid(f"{out} cannot be written: no such folder {out.absolute().parent}")


@contextmanager
def staged(out: Path, size: int = 0) -> Iterator[Path]:
    """Yield a new folder whose content is moved to ``out`` at the end; an exception removes it.

    An existing ``out`` is not replaced: it may be a shell's current folder, a link or a volume. Raises INVALID_ARG if
    writing fails or if the disk has no room for ``size`` bytes.
    """
    exists = out.is_dir()
    try:
        folder = Path(mkdtemp(prefix=".conch-", dir=out if exists else out.absolute().parent))
        try:
            _check_disk_space(folder, size, out)
            yield folder
            for inner, _, _ in os.walk(folder):
                os.chmod(inner, 0o755)
            if exists:
                _move_all(folder, out)
            else:
                os.rename(folder, out.absolute())
        except BaseException:
            rmtree(folder, ignore_errors=True)
            raise
    except OSError as error:
        raise invalid(f"{out} cannot be written: {error.strerror or error}") from None


def _check_disk_space(folder: Path, size: int, out: Path) -> None:
    free = disk_usage(folder).free
    if size > free:
        raise invalid(f"{out} cannot be written: it needs {shown(size)}, but the disk has {shown(free)} free")


def _move_all(folder: Path, out: Path) -> None:
    """Move the content of ``folder``, which is in ``out``, to ``out``. Raises OSError if ``out`` has other entries."""
    if any(path.name != folder.name for path in out.iterdir()):
        raise OSError(ENOTEMPTY, os.strerror(ENOTEMPTY))
    for path in list(folder.iterdir()):
        path.rename(out / path.name)
    folder.rmdir()


# The following functions read configurations and manifests, and write nothing.


#: Reports that ``conch convert`` writes for readers.
_REPORTS: Final = ("report.md", "report.html")


def only_serving(root: Path, packed: Contents, configs: Mapping[str, ModelConfig]) -> Contents:
    """Return the contents of the repository ``root`` without reports and variants that ``configs`` do not serve.

    A model that may run on a GPU is unchanged, because it uses the checkpoint's own weights there. So is a folder that
    another model names as its checkpoint.
    """
    entries = {entry.name: entry for entry in packed.entries}
    named = set(_named_folders(root, packed, configs))
    left_out = list(packed.left_out)
    for entry in packed.entries:
        model, *inside = entry.name.split("/")
        if model not in configs or len(inside) != 2 or inside[1] != FILENAME or entry.source is None:
            continue
        folder = entry.source.parent
        manifest = Manifest.read(folder)
        if manifest is None or folder.resolve() in named or not _on_cpus(configs[model]):
            continue
        kept = manifest.keeping(_serving(manifest, configs[model]))
        gone = [f"{model}/{inside[0]}/{file}" for file in manifest.files.keys() - kept.files.keys()]
        gone += [f"{model}/{report}" for report in _REPORTS]
        left_out += [name for name in gone if entries.pop(name, None) is not None]
        text = kept.to_text().encode()
        entries[entry.name] = replace(entry, size=len(text), text=text)
    return Contents(tuple(entries.values()), tuple(sorted(left_out)))


def _serving(manifest: Manifest, config: ModelConfig) -> set[str]:
    """Return the names of the variants that serve."""
    options = Options.from_values(parameters(config))
    names = {manifest.select(options.variant, files_for(options.engine)).name}
    if manifest.by_shape is not None and not options.variant and options.engine == "auto" and options.by_shape:
        names.add(manifest.by_shape.variant)
    return names


def _on_cpus(config: ModelConfig) -> bool:
    groups = config.instance_group
    return bool(groups) and all(group.kind == ModelInstanceGroup.KIND_CPU for group in groups)


def _named_folders(root: Path, packed: Contents, configs: Mapping[str, ModelConfig]) -> Iterator[Path]:
    """Yield the folders that models name as their checkpoints."""
    for model, version in {tuple(entry.name.split("/")[:2]) for entry in packed.entries if "/" in entry.name}:
        directory = root / model / version
        if model not in configs or not directory.is_dir():
            continue
        document = read_model_file(directory) if (directory / MODEL_FILE).is_file() else {}
        for named in (parameters(configs[model]).get("model"), document.get("model")):
            if isinstance(named, str) and named:
                path = named.replace(MODEL_DIRECTORY, str(directory.parent))
                yield from ((parent / path).resolve() for parent in (directory, directory.parent))


#: A name that every platform accepts, and that needs no quotes in a shell.
_NAME: Final = re.compile(r"(?=.{1,63}$)[A-Za-z0-9]+(-[A-Za-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class Deployment:
    """A checked repository, the model that serves requests, and the endpoint.

    ``endpoint`` is a result of ``endpoint_for``; ``name`` is the platform's name of the deployment;
    ``example`` is the body of a request, as JSON.
    """

    name: str
    model: str
    endpoint: str
    requirements: RepositoryRequirements
    contents: Contents
    example: str


@dataclass(frozen=True, slots=True)
class Bundle:
    """The function that writes the artifact, and the other files by name; ``programs`` are the executable ones.

    ``artifact`` is its name in the output. ``pack`` is called with its path and the contents of the repository, then
    ``texts`` with its size (bytes). ``run_locally`` runs the written files as the platform does.
    """

    texts: Callable[[int], Mapping[str, str]]
    artifact: str
    pack: Callable[[Path, Contents], None]
    run_locally: Runner
    programs: frozenset[str] = frozenset()


#: Plans the files of a deployment. Raises INVALID_ARG for a deployment that the platform does not accept.
Planner = Callable[[Deployment], Bundle]


def deployment(
    repository: Path, out: Path, mount: str, name: str, model: str, endpoint: str, *, several: bool = False
) -> Deployment:
    """Plan the deployment of a repository, whose files the platform puts below ``mount``.

    Empty texts get defaults. With ``several``, requests name their model, and the first model is the example. Raises
    INVALID_ARG for a name that some platform refuses, and as ``check_output``, ``read_requirements`` and
    ``contents`` do.
    """
    if name and not _NAME.fullmatch(name):
        raise invalid(
            f"--name must be letters, digits and single dashes between them, at most 63 characters; got '{name}'"
        )
    requirements = read_requirements(repository, mount)
    check_output(out, repository)
    chosen = requirements.models[0] if several and not model else requirements.chosen(model)
    name = name or f"conch-{re.sub(r'[^A-Za-z0-9]+', '-', chosen).strip('-')}"[:63].strip("-")
    endpoint = endpoint_for(endpoint, chosen, requirements.tasks.get(chosen, ""))
    request = example(requirements.configs[chosen], endpoint, chosen, chosen in requirements.writers)
    packed = only_serving(repository, contents(repository), requirements.configs)
    return Deployment(name, chosen, endpoint, requirements, packed, request)


def check_size(contents: Contents, limit: int, platform: str) -> None:
    """Raise INVALID_ARG if a repository exceeds the limit of ``platform`` (bytes)."""
    if contents.size > limit:
        raise invalid(
            f"the repository has {shown(contents.size)}, but {platform} accepts at most {shown(limit)}: leave out "
            "models, or name their checkpoints on the Hugging Face Hub instead of packing them"
        )


class Written(NamedTuple):
    """The size of an artifact (bytes), and the beginning of its response to ``request.json``; empty if not sent."""

    size: int
    response: str


def write(bundle: Bundle, packed: Contents, out: Path, *, verify: bool = False) -> Written:
    """Write all files to the folder ``out``; leaves nothing behind if it fails.

    With ``verify``, raises as ``try_artifact`` does.
    """
    with staged(out, packed.size) as folder:
        artifact = folder / bundle.artifact
        artifact.parent.mkdir(parents=True, exist_ok=True)
        bundle.pack(artifact, packed)
        size = packed.size if artifact.is_dir() else artifact.stat().st_size
        for name, text in bundle.texts(size).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755 if name in bundle.programs else 0o644)
        return Written(size, try_artifact(bundle.run_locally, folder) if verify else "")
