"""Walks through a page as a reader would: one folder, one shell after another, and servers in the background.

The ports of a page are replaced by free ones, wherever they stand. ``conch serve`` runs until the page starts another
server or ends, unless the page shows how it fails. A command must succeed, or give the output that the page shows for
it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import TracebackType

from conch.config import pbtxt
from tests.docs import given
from tests.docs.expected import appears, shows
from tests.docs.page import Kind, PageStep, ShellCommand, commands
from tests.events import eventually
from tests.oracle.run import free_ports, wait_until_ready

#: Ports that pages use: HTTP, gRPC, metrics, the OpenAI API alone.
PORTS = ("8000", "8001", "8002", "9000")
_SERVE = re.compile(r"(?:^|\s|\.venv/bin/)conch serve\b")
#: How long a server may take to be ready, and a command to end, on a busy machine.
_SECONDS = 240
#: How much of an output a failure quotes (characters).
_SHOWN = 4000


class PageWalk:
    """The state of a reader who has come so far: files in ``folder``, perhaps a running server."""

    def __init__(self, page: str, folder: Path) -> None:
        self.page = page
        self.folder = folder
        self.log = folder / "server.log"
        self._ports = dict(zip(PORTS, map(str, free_ports(len(PORTS))), strict=True))
        self._server: subprocess.Popen[bytes] | None = None
        self._printed = ""
        # Where no answer is shown, one that is an error must not pass: curl itself does not mind.
        self._home = _home(folder / ".lenient", "silent\n")
        self._strict_home = _home(folder / ".strict", "silent\nshow-error\nfail-with-body\n")
        scripts = sysconfig.get_path("scripts")
        self._environment = {
            **os.environ,
            "PATH": f"{scripts}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_CACHE": str(folder / given.HUB),
        }

    def __enter__(self) -> PageWalk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_server()

    def take(self, step: PageStep) -> None:
        """Do what a step says; AssertionError with the page and line where it is not as the page says."""
        match step.kind:
            case Kind.GIVEN:
                given.provide(step.text, self.folder)
            case Kind.FILE:
                target = self.folder / step.path
                assert target.is_relative_to(self.folder), f"{self.page}:{step.line}: {step.path} is not in the folder"
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(self._with_own_ports(step.text))
            case Kind.SESSION:
                for command in commands(step):
                    self._run(command, step)
            case Kind.PROGRAM:
                self._printed = self._succeeded([sys.executable, "-c", self._with_own_ports(step.text)], step)
            case Kind.OUTPUT:
                assert shows(self._with_own_ports(step.text), self._printed), self._unlike(step, self._printed)
            case Kind.FRAGMENT if step.language == "pbtxt":
                pbtxt.parse(step.text, f"{self.page}:{step.line}")

    def _run(self, command: ShellCommand, step: PageStep) -> None:
        typed = self._with_own_ports(command.text)
        shown = None if command.output is None else self._with_own_ports(command.output)
        if _SERVE.search(typed) and "--help" not in typed:
            self._serve(typed, shown, step)
        elif shown is None:
            self._printed = self._succeeded(["bash", "-c", typed], step)
        else:
            self._printed = self._completed(["bash", "-c", typed], self._home).stdout
            assert shows(shown, self._printed), self._unlike(step, self._printed)

    def _serve(self, typed: str, shown: str | None, step: PageStep) -> None:
        self._stop_server()
        ports = " ".join(
            f"--{name}-port={self._ports[port]}" for name, port in zip(("http", "grpc", "metrics"), PORTS, strict=False)
        )
        command = _SERVE.sub(lambda found: f"{found[0]} {ports}", typed.removeprefix("exec "))
        with self.log.open("wb") as output:
            self._server = subprocess.Popen(
                ["bash", "-c", _last_command_replaces_the_shell(command)],
                cwd=self.folder, env=self._environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            scheme = "https" if "--http-use-ssl=true" in typed else "http"
            wait_until_ready(f"127.0.0.1:{self._ports['8000']}", self._server, _SECONDS, scheme)
        except BaseException as error:
            if shown is not None and shows(shown, self.log.read_text()):
                return  # it ended, as the page says
            raise AssertionError(f"{self.page}:{step.line}: {typed}\n{error}\n{self.log.read_text()}") from error
        if shown is not None:
            eventually(lambda: appears(shown, self.log.read_text()), f"{self.page}:{step.line}: the output\n{shown}")

    def _stop_server(self) -> None:
        if self._server is not None:
            self._server.terminate()
            try:
                self._server.wait(_SECONDS)
            finally:
                if self._server.poll() is None:
                    self._server.kill()
                self._server = None

    def _succeeded(self, command: list[str], step: PageStep) -> str:
        done = self._completed(command, self._strict_home)
        log = self.log.read_text() if self.log.exists() else ""
        assert done.returncode == 0, f"{self.page}:{step.line}: {step.text}\n{done.stdout}\n{log[-4000:]}"
        return done.stdout

    def _completed(self, command: list[str], home: Path) -> subprocess.CompletedProcess[str]:
        environment = {**self._environment, "CURL_HOME": str(home)}
        return subprocess.run(
            command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=_SECONDS,
        )  # fmt: skip

    def _with_own_ports(self, text: str) -> str:
        return re.sub(rf"\b({'|'.join(PORTS)})\b", lambda found: self._ports[found[0]], text)

    def _unlike(self, step: PageStep, output: str) -> str:
        return f"{self.page}:{step.line} shows\n{step.text}\nbut the output is\n{output[:_SHOWN]}"


def _home(folder: Path, curl_settings: str) -> Path:
    folder.mkdir()
    (folder / ".curlrc").write_text(curl_settings)
    return folder


def _last_command_replaces_the_shell(command: str) -> str:
    """With ``exec``, so that the server gets the signals that are sent to the shell; variables may stand before it."""
    variables, serve = re.match(r"((?:\w+=\S+\s+)*)(.*)", command, re.DOTALL).groups()  # type: ignore[union-attr]
    return f"{variables}exec {serve}"
