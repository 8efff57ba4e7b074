"""What a deployment consists of, and writing it: the artifact with the repository, and the files beside it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from conch.deploy.contents import Contents, contents
from conch.deploy.endpoint import endpoint_for
from conch.deploy.examples import example
from conch.deploy.needs import Needs, needs
from conch.deploy.output import check_output, staged
from conch.deploy.rendering import shown
from conch.deploy.serving import only_serving
from conch.deploy.trial import Runner, try_artifact
from conch.errors import invalid

#: A name that every platform takes, and that needs no quotation marks in a shell.
_NAME: Final = re.compile(r"(?=.{1,63}$)[A-Za-z0-9]+(-[A-Za-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is deployed: a repository that has been looked through, the model that answers, and how it is asked.

    ``endpoint`` is what ``endpoint.endpoint_for`` gives; ``name`` is what the platform calls the deployment;
    ``example`` is the body of a request, as JSON.
    """

    name: str
    model: str
    endpoint: str
    needs: Needs
    contents: Contents
    example: str


@dataclass(frozen=True, slots=True)
class Bundle:
    """How the artifact is written, and the files beside it by their names, some of which are programs.

    ``artifact`` is its name in the output; ``pack`` is called with its path and the contents of the repository, and
    ``texts`` with the bytes that it has got.  ``run_locally`` is how the platform runs what was written.
    """

    texts: Callable[[int], Mapping[str, str]]
    artifact: str
    pack: Callable[[Path, Contents], None]
    run_locally: Runner
    programs: frozenset[str] = frozenset()


#: What a platform needs for a deployment.  Raises INVALID_ARG for what the platform does not take.
Planner = Callable[[Deployment], Bundle]


def deployment(
    repository: Path, out: Path, mount: str, name: str, model: str, endpoint: str, *, several: bool = False
) -> Deployment:
    """Look through a repository, whose files the platform puts below ``mount``.

    Empty texts are chosen; with ``several``, requests name their model, and the first is an example.  Raises
    INVALID_ARG for a name that some platform does not take, and as ``check_output``, ``needs`` and ``contents`` do.
    """
    if name and not _NAME.fullmatch(name):
        raise invalid(
            f"--name takes letters, digits and single dashes between them, 63 characters at most, and not '{name}'"
        )
    found = needs(repository, mount)
    check_output(out, repository)
    chosen = found.models[0] if several and not model else found.chosen(model)
    name = name or f"conch-{re.sub(r'[^A-Za-z0-9]+', '-', chosen).strip('-')}"[:63].strip("-")
    endpoint = endpoint_for(endpoint, chosen, found.tasks.get(chosen, ""))
    asked = example(found.configs[chosen], endpoint, chosen, chosen in found.writers)
    packed = only_serving(repository, contents(repository), found.configs)
    return Deployment(name, chosen, endpoint, found, packed, asked)


def check_size(contents: Contents, limit: int, place: str) -> None:
    """Raise INVALID_ARG for a repository of more bytes than ``place`` takes."""
    if contents.size > limit:
        raise invalid(
            f"the repository has {shown(contents.size)}, and {place} takes at most {shown(limit)}: leave models out, "
            "or name their checkpoints on the Hugging Face Hub instead of packing them"
        )


class Written(NamedTuple):
    """The bytes of an artifact, and the first part of its answer to ``request.json``; empty where it was not sent."""

    size: int
    answer: str


def write(bundle: Bundle, found: Contents, out: Path, *, verify: bool = False) -> Written:
    """Write all of it into the folder ``out``.  Nothing is left where it fails.

    With ``verify``, raises as ``try_artifact`` does.
    """
    with staged(out, found.size) as folder:
        artifact = folder / bundle.artifact
        artifact.parent.mkdir(parents=True, exist_ok=True)
        bundle.pack(artifact, found)
        size = found.size if artifact.is_dir() else artifact.stat().st_size
        for name, text in bundle.texts(size).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755 if name in bundle.programs else 0o644)
        return Written(size, try_artifact(bundle.run_locally, folder) if verify else "")
