"""Reads the small files of a repository, none of which can hold up who reads it or fill the memory."""

from __future__ import annotations

import errno
from pathlib import Path
from stat import S_ISREG
from typing import Final

#: The most bytes of a configuration, a source or another file that people write.
MOST_BYTES: Final = 16 << 20


def read_small(path: Path, most: int = MOST_BYTES) -> bytes:
    """The content of a file.

    Raises OSError as opening it does, and for what is no regular file (reading a pipe waits for ever, a device may have
    no end) or has more than ``most`` bytes.
    """
    status = path.stat()
    if not S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    if status.st_size > most:
        raise OSError(errno.EFBIG, f"it has {status.st_size:,} bytes, and may have {most:,}", str(path))
    with path.open("rb") as file:
        return file.read(most)


def shown_name(name: str) -> str:
    """A text with names of files for people: bytes that are no UTF-8 and control characters as ``\\xNN``."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(one if one.isprintable() or one == " " else f"\\x{ord(one):02x}" for one in text)
