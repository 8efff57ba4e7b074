"""Tests a written artifact: serves it on this machine as its platform does, for one request.

Uses the written command and environment; only paths, addresses and ports differ.
"""

from __future__ import annotations

import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import environ
from pathlib import Path
from typing import Final

from conch.client.deadline import DeadlineError
from conch.client.http import fetch
from conch.core.errors import ConchError, internal, invalid
from conch.machine.guarded_server import GuardedServer
from conch.machine.temporary import TemporaryFolder

_HOST: Final = "127.0.0.1"
#: The timeout of loading models (s): the shortest of the platforms.
_START_SECONDS: Final = 600.0
#: The timeout of a complete response (s) on every platform.
RESPONSE_SECONDS: Final = 60.0
#: The maximum length of a response in the output (characters).
_SHOWN: Final = 300
#: Prefixes of platform variables, which this machine may have set for other reasons.
_FOREIGN: Final = ("AIP_", "MODEL_DEPLOY_", "SAGEMAKER_")
#: Replaces the image's ``conch`` by the same command, reachable only from this machine.
_CONCH: Final = f"""#!/bin/sh
exec {{python}} -m conch "$@" --platform-address={_HOST} --http-address={_HOST} --allow-metrics=false \\
    --exit-timeout-secs=5
"""
#: The last line of every error.
_ADVICE: Final = "Nothing was written.  With --no-verify, the artifact is written without this request."


@dataclass(frozen=True, slots=True)
class LocalRun:
    """A platform's container as a process: ``command`` with ``environment``; ``health`` and ``path`` are HTTP paths.

    Requests are sent to ``path`` once ``health`` returns status 200.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    health: str
    path: str


#: Returns how a platform runs an artifact, from the folder with the written files, an empty folder for files that the
#: platform unpacks, and a free port. Raises OSError.
Runner = Callable[[Path, Path, int], LocalRun]


def try_artifact(run_locally: Runner, written: Path) -> str:
    """Send ``request.json`` to the artifact in the folder ``written``; returns the beginning of the response.

    Raises INTERNAL if the server does not start or returns an error, INVALID_ARG if the artifact cannot be served here.
    """
    try:
        with TemporaryFolder("deploy") as folder:
            port = free_port()
            run = run_locally(written, folder, port)
            try:
                return _serve_once(run, port, (written / "request.json").read_bytes(), folder)
            except ConchError as error:
                reason = error.message.replace(f"{folder}/", "")
                raise internal(f"served here as on the platform, {reason}\n{_ADVICE}") from None
    except OSError as error:
        raise invalid(f"the artifact cannot be served here: {error}\n{_ADVICE}") from None


def copy_program(program: Path, folder: Path, replacements: Mapping[str, str]) -> str:
    """Copy a container's program to ``folder``, with its paths replaced; returns the path of the copy."""
    text = program.read_text(encoding="utf-8")
    for inside, outside in replacements.items():
        text = text.replace(inside, outside)
    copy = folder / program.name
    copy.write_text(text, encoding="utf-8")
    copy.chmod(0o755)
    return str(copy)


def _serve_once(run: LocalRun, port: int, body: bytes, folder: Path) -> str:
    programs = folder / "bin"
    programs.mkdir()
    conch = programs / "conch"
    conch.write_text(_CONCH.format(python=shlex.quote(sys.executable)))
    conch.chmod(0o755)
    own = {name: value for name, value in environ.items() if not name.startswith(_FOREIGN)}
    own["PATH"] = f"{programs}:{own.get('PATH', '')}"
    server = GuardedServer(run.command, folder / "log", {**own, **run.environment}, folder)
    try:
        wait_until_healthy(server, port, run.health)
        try:
            status, response = _send_request(port, run.path, body)
        except DeadlineError:
            raise internal(f"there was no response to request.json within {RESPONSE_SECONDS:g} s") from None
        except ConchError as error:
            _require_running(server)
            raise internal(f"there was no response to request.json: {error}") from None
        if status != 200 or response.startswith('data: {"error"'):
            raise internal(f"the response to request.json has status {status}: {response}")
        return response
    finally:
        server.close()


def wait_until_healthy(server: GuardedServer, port: int, path: str) -> None:
    """Wait until a GET of ``path`` returns 200. Raises INTERNAL if the server ends, or after ten minutes."""
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        _require_running(server)
        try:
            if _send_request(port, path)[0] == 200:
                return
        except ConchError:
            pass  # not listening yet
        time.sleep(0.05)
    raise internal(f"the models were not loaded within {_START_SECONDS:g} s:\n{server.log_end()}")


def _require_running(server: GuardedServer) -> None:
    if message := server.exit_message:
        raise internal(message)


def _send_request(port: int, path: str, body: bytes | None = None) -> tuple[int, str]:
    """Return the status and the beginning of the response. Raises UNAVAILABLE."""
    status, content = fetch(f"http://{_HOST}:{port}{path}", RESPONSE_SECONDS, body)
    text = content.decode("utf-8", "replace").strip()
    return status, text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.create_server((_HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
