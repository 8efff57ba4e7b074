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
CONSTRAINTS: Final = ROOT.parent / "constraints.txt"
SHARED: Final = ("transformers", "tokenizers", "onnxruntime")
PACKAGES: Final = ("numpy<2", "torch", "fastapi", "uvicorn", "uvloop", "httptools", "accelerate", "openai", "rich")


def python() -> Path:
    """The interpreter, made and filled on first use (200 MB to fetch, some minutes)."""
    wanted = [*PACKAGES, *map(_as_here, SHARED)]
    stamp = hashlib.sha256("\n".join([sys.version, *wanted, CONSTRAINTS.read_text()]).encode()).hexdigest()
    interpreter = HOME / "bin" / "python"
    ROOT.mkdir(exist_ok=True)
    with locked(ROOT / "peers.lock"):
        done = HOME / "stamp"
        if not done.exists() or done.read_text() != stamp:
            print(f"Installing the peers' environment into {HOME} ...", file=sys.stderr)
            shutil.rmtree(HOME, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(HOME)], check=True)
            pip = [str(interpreter), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
            filled = subprocess.run([*pip, "-c", str(CONSTRAINTS), *wanted], capture_output=True, text=True)
            if filled.returncode:
                raise OracleUnavailable(f"the peers' environment: {filled.stderr.strip()}")
            done.write_text(stamp)
    return interpreter


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
