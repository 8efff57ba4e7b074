"""The command line that reproduces a measurement, quoted for a shell, without secrets. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Final

#: Headers and parameters that contain secrets.
_SECRET: Final = re.compile(
    r"(?i)((?:authorization|cookie|[\w-]*(?:api-?key|token|secret|password))\s*[:=]\s*).+", re.DOTALL
)


def command_line(arguments: Sequence[str]) -> str:
    """Return ``conch`` with the arguments of this process; the values of secret headers are replaced by ``...``."""
    return shlex.join(["conch", *(_SECRET.sub(r"\1...", argument) for argument in arguments[1:])])
