"""The environment of the peers: a virtual environment with a numpy older than 2, as the real Triton needs it.

It has the versions of the libraries that conch runs with here, so that a ratio compares the servers.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from tests.oracle.install import ROOT, OracleUnavailable

HOME: Final = ROOT / "peers"
_STAMP: Final = HOME / "stamp"
CONSTRAINTS: Final = ROOT.parent / "constraints-newest.txt"
SHARED: Final = ("transformers", "tokenizers", "onnxruntime")
PACKAGES: Final = ("numpy<2", "torch", "fastapi", "uvicorn", "uvloop", "httptools", "accelerate", "openai", "rich")


def python() -> Path:
    """The interpreter, made and filled on first use (200 MB to fetch, some minutes)."""
    interpreter = HOME / "bin" / "python"
    ROOT.mkdir(exist_ok=True)
    with locked(ROOT / "peers.lock"):
        if not installed():
            print(f"Installing the peers' environment into {HOME} ...", file=sys.stderr)
            shutil.rmtree(HOME, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(HOME)], check=True)
            pip = [str(interpreter), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
            filled = subprocess.run([*pip, "-c", str(CONSTRAINTS), *_wanted()], capture_output=True, text=True)
            if filled.returncode:
                raise OracleUnavailable(f"the peers' environment: {filled.stderr.strip()}")
            _STAMP.write_text(_contents())
    return interpreter


def installed() -> bool:
    """Whether the environment is there already, with what conch runs with now."""
    return _STAMP.exists() and _STAMP.read_text() == _contents()


def _wanted() -> list[str]:
    return [*PACKAGES, *map(_as_here, SHARED)]


def _contents() -> str:
    """What identifies an environment: changes when another one must be made."""
    return hashlib.sha256("\n".join([sys.version, *_wanted(), CONSTRAINTS.read_text()]).encode()).hexdigest()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock at ``path``: what is made under it is made by one process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _as_here(package: str) -> str:
    try:
        return f"{package}=={version(package)}"
    except PackageNotFoundError:
        return package
