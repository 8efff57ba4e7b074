"""The environments of the peers, each a virtual environment.

``peers`` has the versions of the libraries that conch runs with here, so that a ratio compares the servers, and a numpy
older than 2, as the real Triton needs it. The other environments are those of peers that need older libraries.
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

PEERS: Final = "peers"
CONSTRAINTS: Final = ROOT.parent / "constraints-newest.txt"
SHARED: Final = ("transformers", "tokenizers", "onnxruntime")
PACKAGES: Final = {
    PEERS: ("numpy<2", "torch", "fastapi", "uvicorn", "uvloop", "httptools", "accelerate", "openai", "rich"),
    "sentence-transformers": ("sentence-transformers", "torch", "fastapi", "uvicorn", "uvloop", "httptools"),
    "openvino": ("optimum-intel[openvino,nncf]", "sentence-transformers", "fastapi", "uvicorn", "uvloop", "httptools"),
    "infinity": ("infinity-emb[server,torch,optimum]",),
}


def python(name: str = PEERS) -> Path:
    """The interpreter of one of ``PACKAGES``, made and filled on first use (200 MB to fetch, some minutes)."""
    home = ROOT / name
    interpreter = home / "bin" / "python"
    ROOT.mkdir(exist_ok=True)
    with locked(ROOT / f"{name}.lock"):
        if not installed(name):
            print(f"Installing the peers' environment into {home} ...", file=sys.stderr)
            shutil.rmtree(home, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
            pip = [str(interpreter), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
            filled = subprocess.run([*pip, *_wanted(name)], capture_output=True, text=True)
            if filled.returncode:
                raise OracleUnavailable(f"the peers' environment: {filled.stderr.strip()}")
            (home / "stamp").write_text(_contents(name))
    return interpreter


def installed(name: str = PEERS) -> bool:
    """Whether the environment is there already, with what conch runs with now."""
    stamp = ROOT / name / "stamp"
    return stamp.exists() and stamp.read_text() == _contents(name)


def _wanted(name: str) -> list[str]:
    if name not in (PEERS, "sentence-transformers"):
        return [*PACKAGES[name]]
    return ["-c", str(CONSTRAINTS), *PACKAGES[name], *map(_as_here, SHARED)]


def _contents(name: str) -> str:
    """What identifies an environment: changes when another one must be made."""
    wanted = _wanted(name)
    constraints = [CONSTRAINTS.read_text()] if str(CONSTRAINTS) in wanted else []
    return hashlib.sha256("\n".join([sys.version, *wanted, *constraints]).encode()).hexdigest()


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
