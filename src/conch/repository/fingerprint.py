"""Detects changed model files, and identifies everything that a model version's responses depend on.

A fingerprint consists of modification times and sizes, without reading the files. An identity is a digest, for caches
that outlive the version.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from conch import __version__
from conch.config.schema import ModelConfig
from conch.repository.versions import directories_in, read_versions

#: Folders that running a model creates beside its files.
_IGNORED = frozenset({"__pycache__"})

#: The maximum number of files to examine in a model, because a link may lead to the whole file system.
MOST_FILES: Final = 100_000

#: One file: its path within the model directory, modification time (ns) and size (bytes).
Stamp = tuple[str, int, int]
#: Files and folders outside of the model directory that a model reads, such as a checkpoint, with their stamps.
ExternalFiles = Mapping[Path, frozenset[Stamp]]


@dataclass(frozen=True)
class Fingerprint:
    """The stamps of a model directory's files: the configuration, each version, and everything else."""

    config: frozenset[Stamp]
    versions: Mapping[int, frozenset[Stamp]]
    rest: frozenset[Stamp]

    def same_version(self, other: Fingerprint, version: int) -> bool:
        """Return whether ``version`` has the same files in ``other``, regardless of the configuration."""
        return self.rest == other.rest and self.versions.get(version) == other.versions.get(version)


def take_fingerprint(directory: Path, config_name: str | None = None) -> Fingerprint:
    """Return the fingerprint of a directory's current files. Follows links; ignores hidden files and ``__pycache__``.

    Without ``config_name`` the directory ``configs`` is ignored too. Raises OSError for more than ``MOST_FILES``
    files.
    """
    return fingerprint_of(take_stamps(directory), directories_in(directory), config_name)


def fingerprint_of(stamps: Iterable[Stamp], directories: Iterable[str], config_name: str | None = None) -> Fingerprint:
    """Return the fingerprint of a model with these relevant files and these directories."""
    configs = "configs" + os.sep
    config: set[Stamp] = set()
    rest: set[Stamp] = set()
    versions: dict[str, set[Stamp]] = {str(version): set() for version in read_versions(directories).found}
    for stamp in stamps:
        top, inside, _ = stamp[0].partition(os.sep)
        if stamp[0] == "config.pbtxt" or (config_name and stamp[0] == f"{configs}{config_name}.pbtxt"):
            config.add(stamp)
        elif inside and top in versions:
            versions[top].add(stamp)
        elif not stamp[0].startswith(configs):
            rest.add(stamp)
    of_versions = {int(version): frozenset(found) for version, found in versions.items()}
    return Fingerprint(frozenset(config), of_versions, frozenset(rest))


def take_external(paths: Iterable[Path]) -> dict[Path, frozenset[Stamp]]:
    """Return the stamps of each file, and of the relevant files in each folder; none for an unreadable path."""
    return {path: _stamps_at(path) for path in paths}


def _stamps_at(path: Path) -> frozenset[Stamp]:
    try:
        if path.is_dir():
            return frozenset(take_stamps(path))
        status = path.stat()
    except OSError:
        return frozenset()
    return frozenset({(path.name, status.st_mtime_ns, status.st_size)})


def counts(path: str) -> bool:
    """Return whether a file is part of fingerprints, given its path in the model directory."""
    parts = path.split(os.sep)
    return not any(part.startswith(".") or part in _IGNORED for part in parts)


def take_stamps(directory: Path) -> Iterator[Stamp]:
    """Yield the stamps of the relevant files in a directory; raises as :func:`take_fingerprint` does."""
    seen: set[tuple[int, int]] = set()
    left = MOST_FILES
    for folder, folders, files in os.walk(directory, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = [name for name in folders if name not in _IGNORED and not name.startswith(".")]
        left -= len(files) + len(folders)
        if left < 0:
            raise OSError(
                errno.EFBIG, f"it has more than {MOST_FILES:,} files: does a link lead elsewhere?", str(directory)
            )
        for name in files:
            path = os.path.join(folder, name)
            try:
                status = os.stat(path)
            except OSError:
                continue
            if not name.startswith("."):
                yield os.path.relpath(path, directory), status.st_mtime_ns, status.st_size


#: Files up to this size (bytes) are hashed. Larger files, usually weights, are identified by size and modification
#: time.
MOST_BYTES_READ: Final = 1 << 20


class Identity(NamedTuple):
    """The digest of a version's dependencies.

    ``unknown`` names a dependency without a digest; if it is set, responses are not shared.
    """

    digest: bytes = b""
    unknown: str = ""


NO_IDENTITY: Final = Identity()


class Dependency(NamedTuple):
    """A dependency of responses outside of the version's directory, as the worker reports it.

    ``kind`` is ``path`` for a file or folder, ``revision`` for immutable content (``org/name@commit``), or ``unknown``
    for anything else.
    """

    kind: str
    text: str


def identity_of(
    directories: Sequence[Path],
    version: int,
    config: ModelConfig,
    *,
    began: int,
    facts: Mapping[str, str],
    dependencies: Iterable[Dependency] = (),
) -> Identity:
    """Return the identity of a version with this configuration. Blocks.

    ``directories`` are the directories of the model and, if it has one, of its Python-based backend. ``began`` is the
    time at which its load began (ns since the epoch). ``facts`` are further dependencies of responses, by name. Two
    servers have the same identity if their small files are equal and their large files have equal sizes and times.
    """
    digest = hashlib.blake2b(config.SerializeToString(deterministic=True), digest_size=16)
    digest.update(repr((__version__, sorted(facts.items()))).encode(errors="surrogatepass"))
    try:
        for directory in directories:
            fingerprint = take_fingerprint(directory)
            for name, *_ in sorted(fingerprint.versions.get(version, frozenset()) | fingerprint.rest):
                digest.update(_file(directory / name, name, began))
        for kind, text in sorted(set(dependencies)):
            if kind == "unknown":
                return Identity(unknown=text)
            if kind == "revision":
                digest.update(text.encode(errors="surrogatepass"))
                continue
            path = Path(text)
            if path.is_relative_to(directories[0] / str(version)):
                continue  # covered by the files above
            for name, *_ in sorted(take_stamps(path)) if path.is_dir() else [(path.name,)]:
                digest.update(_file(path / name if path.is_dir() else path, name, began))
    except OSError as error:
        return Identity(unknown=f"{error.strerror}: {error.filename}")
    return Identity(digest.digest())


def joint_identity(identity: Identity, steps: Iterable[tuple[str, Identity]]) -> Identity:
    """Return the identity of an ensemble, which includes the identities of its steps, given by model name."""
    digest = hashlib.blake2b(identity.digest, digest_size=16)
    for name, step in steps:
        if step.unknown:
            return Identity(unknown=f"model '{name}', which depends on {step.unknown}")
        digest.update(step.digest)
    return identity if identity.unknown else Identity(digest.digest())


def _file(path: Path, name: str, began: int) -> bytes:
    """Return a digest of a file under its ``name``. Raises OSError for a file changed after the load ``began``."""
    status = path.stat()
    if status.st_ctime_ns > began:
        raise OSError(errno.EAGAIN, "a file that changed while the model was being loaded", str(path))
    small = status.st_size <= MOST_BYTES_READ
    digest = hashlib.blake2b(repr((name, status.st_size, small)).encode(errors="surrogatepass"))
    digest.update(path.read_bytes() if small else repr(status.st_mtime_ns).encode())
    return digest.digest()
