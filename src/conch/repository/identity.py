"""Digests of everything that a model version's responses depend on, for caches that outlive the version."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from conch import __version__
from conch.config.schema import ModelConfig
from conch.repository.fingerprint import take_fingerprint, take_stamps

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
