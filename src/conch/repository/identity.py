"""A digest of what a model version answers from, for caches that outlive the version: other files, other answers."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from conch.config.schema import ModelConfig
from conch.repository.fingerprint import take_fingerprint

#: Files up to this size are gone through.  Larger ones, weights as a rule, count by their size and time.
_MOST_BYTES_READ: Final = 1 << 20


def identity_of(directories: Iterable[Path], version: int, config: ModelConfig) -> bytes:
    """The digest of a version's configuration and files; blocking.

    ``directories`` are the model's, and that of its Python-based backend if it has one.  Two servers
    with the same small files, and copies of the large ones that kept their times, have the same.
    """
    digest = hashlib.blake2b(config.SerializeToString(deterministic=True), digest_size=16)
    for directory in directories:
        try:
            fingerprint = take_fingerprint(directory)
        except OSError:  # too many files: nobody else's answers can be trusted
            return os.urandom(16)
        for name, time, size in sorted(fingerprint.versions.get(version, frozenset()) | fingerprint.rest):
            digest.update(repr((name, size)).encode(errors="surrogatepass"))
            digest.update(_content(directory / name, size) or repr(time).encode())
    return digest.digest()


def _content(path: Path, size: int) -> bytes:
    if size > _MOST_BYTES_READ:
        return b""
    try:
        return hashlib.blake2b(path.read_bytes()).digest()
    except OSError:
        return b""
