"""llama.cpp's server, built from the source that the package llama-cpp-python carries.

    python -m benchmarks.peers.llama [JOBS]        # ahead of time; a quarter of an hour on two cores

Needs cmake, ninja and a C++ compiler. There is no server in the wheels of that package but one in Python that answers
one request at a time, which would be no comparison.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.peers.environment import locked
from tests.oracle.install import ROOT, OracleUnavailable

PACKAGE: Final = "llama-cpp-python==0.3.36"
HOME: Final = ROOT / "llama"
PROGRAM: Final = HOME / "build" / "bin" / "llama-server"
_TOOLS: Final = ("cmake", "ninja", "c++")
#: For the processor at hand, and without what only a browser or a download would need.
_OPTIONS: Final = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
#: GCC 12 takes the stores to the tiles' configuration for dead, and where there is AMX the first product crashes
#: (llama.cpp's issue 20824): a file, what is in it, and what is put before that.
_AMX: Final = (
    "ggml/src/ggml-cpu/amx/mmq.cpp",
    "    _tile_loadconfig(&tc);",
    '    __asm__ volatile("" : : "r"(&tc) : "memory");\n',
)


def server(jobs: int = 2) -> Path:
    """The program, built on first use. Raises OracleUnavailable where it cannot be."""
    ROOT.mkdir(exist_ok=True)
    with locked(ROOT / "llama.lock"):
        if not PROGRAM.exists():
            _build(jobs)
    return PROGRAM


def _build(jobs: int) -> None:
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise OracleUnavailable(f"llama.cpp's server cannot be built without {', '.join(missing)}")
    source, build = HOME / "source", HOME / "build"
    if not source.exists():
        _fetch(source)
    print(f"Building llama.cpp's server in {build} ...", file=sys.stderr)
    _run("cmake", "-S", str(source), "-B", str(build), "-G", "Ninja", *_OPTIONS)
    _run("nice", "cmake", "--build", str(build), "--target", "llama-server", "-j", str(jobs))


def _fetch(source: Path) -> None:
    """Unpack llama.cpp out of the package's source distribution."""
    HOME.mkdir(exist_ok=True)
    with TemporaryDirectory(dir=HOME) as folder:
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--no-deps"]
        _run(*pip, "--no-binary", "llama-cpp-python", "--dest", folder, PACKAGE)
        (archive,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        (unpacked,) = Path(folder).glob("*/vendor/llama.cpp")
        file, text, before = _AMX
        content = (unpacked / file).read_text()
        (unpacked / file).write_text(content.replace(text, before + text))
        unpacked.rename(source)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OracleUnavailable(f"{' '.join(command[:3])}: {(done.stderr or done.stdout).strip()[-800:]}")


if __name__ == "__main__":
    print(server(int(sys.argv[1]) if len(sys.argv) > 1 else 2))
