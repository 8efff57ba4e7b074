"""conch as a subprocess, with the same interface as the oracle's ``TritonServer``."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
import tempfile
import urllib.request
from pathlib import Path
from types import TracebackType

from tests.oracle.run import free_ports, wait_until_ready

CONCH = Path(sysconfig.get_path("scripts")) / "conch"


class ConchServer:
    """``conch serve`` over ``repository``, as a context manager.

    ``http``, ``grpc`` and ``metrics`` are ``127.0.0.1:port``. With ``wait=False`` the context is
    entered at once. Leaving it ends the server with SIGTERM, and with SIGKILL when it does not end.
    """

    def __init__(
        self,
        repository: Path | str,
        *flags: str,
        log: Path | None = None,
        wait: bool = True,
        env: dict[str, str] | None = None,
    ) -> None:
        self.wait = wait
        ports = free_ports(3)
        self.http, self.grpc, self.metrics = (f"127.0.0.1:{port}" for port in ports)
        self.command = [
            str(CONCH),
            "serve",
            f"--model-repository={repository}",
            "--http-address=127.0.0.1",
            f"--http-port={ports[0]}",
            "--grpc-address=127.0.0.1",
            f"--grpc-port={ports[1]}",
            f"--metrics-port={ports[2]}",
            "--exit-timeout-secs=3",
            *flags,
        ]
        self.env = {**os.environ, **(env or {})}
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ConchServer:
        with self.log.open("w+b") if self.log else tempfile.TemporaryFile() as output:
            self.process = subprocess.Popen(self.command, env=self.env, stdout=output, stderr=subprocess.STDOUT)
            if self.wait:
                try:
                    wait_until_ready(self.http, self.process)
                except BaseException as error:
                    self.stop()
                    output.seek(0)
                    error.add_note(output.read()[-3000:].decode(errors="replace"))
                    raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def cache_hits(self, model: str) -> int:
        """Return how many responses of a model came from the response cache."""
        with urllib.request.urlopen(f"http://{self.http}/v2/models/{model}/stats", timeout=60) as reply:
            [statistics] = json.load(reply)["model_stats"]
        return int(statistics["inference_stats"]["cache_hit"]["count"])

    def stop(self) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
