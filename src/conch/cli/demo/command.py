"""``conch demo``: builds a repository, serves it in a process of its own, asks it something and keeps it running."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final, NoReturn

import click
from rich.console import Console

from conch.cli.demo.build import build, require_packages
from conch.cli.demo.client import TIMEOUT, DemoClient
from conch.cli.demo.questions import ask_embedders, ask_generator
from conch.core.errors import internal, unavailable
from conch.machine.guarded_server import GuardedServer
from conch.machine.ports import holder, is_free
from conch.measure.reports import terminal
from conch.measure.reports.report import Column, Row, Table

HOST: Final = "127.0.0.1"
#: How long the models may take to load (s).
START_SECONDS: Final = 300
#: How long nothing is said while models load (s).
SILENCE_SECONDS: Final = 5

SERVED: Final = {
    "minilm": "text to embedding, all-MiniLM-L6-v2",
    "minilm_ensemble": "the same, joined from the next three",
    "minilm_tokenizer": "text to token ids",
    "minilm_model": "token ids to one vector a token",
    "minilm_pooling": "one vector a token to one a text",
    "smollm2": "chat, SmolLM2-135M-Instruct",
}


@click.command("demo")
@click.option("--once", is_flag=True, help="Stop after the first requests.")
@click.option("--directory", type=click.Path(path_type=Path), default=Path(".demo"), show_default=True,
              help="Where the repository and the server's log are written.")  # fmt: skip
@click.option("--http-port", type=click.IntRange(1, 65535), default=8000, show_default=True)
@click.option("--grpc-port", type=click.IntRange(1, 65535), default=8001, show_default=True)
@click.option("--metrics-port", type=click.IntRange(1, 65535), default=8002, show_default=True)
def demo_command(once: bool, directory: Path, http_port: int, grpc_port: int, metrics_port: int) -> None:
    """Serve a sentence encoder and a chat model, and ask them something."""
    console = terminal.console()
    require_packages()
    require_free({"--http-port": http_port, "--grpc-port": grpc_port, "--metrics-port": metrics_port})
    repository = build(directory)
    _say(console, f"wrote {len(SERVED)} models to {repository}, from packages that are installed")
    command = [
        *(sys.executable, "-m", "conch", "serve", f"--model-repository={repository}"),
        *(f"--http-address={HOST}", f"--http-port={http_port}", f"--grpc-address={HOST}", f"--grpc-port={grpc_port}"),
        *(f"--metrics-address={HOST}", f"--metrics-port={metrics_port}"),
    ]
    with running(command, directory / "serve.log") as server, DemoClient(f"http://{HOST}:{http_port}") as client:
        _say(console, f"conch serve --model-repository={repository} ... (its log is {directory / 'serve.log'})")
        wait_until_ready(client, server, directory / "serve.log", console)
        show_models(client, console)
        ask_embedders(client, console)
        ask_generator(client, console)
        if not once:
            show_commands(console, http_port, metrics_port)
            keep_serving(server, console)


def require_free(ports: Mapping[str, int]) -> None:
    """Raise UNAVAILABLE when something listens on one of the ports, which are given by their flags.

    The demo would talk to that instead.  The message has the command that uses ports which are free.
    """
    taken = {flag: port for flag, port in ports.items() if not is_free(HOST, port)}
    if not taken:
        return
    holders = ", ".join(f"port {port} is taken by {holder(port)}" for port in taken.values())
    chosen = set(ports.values())
    others = []
    for flag, port in taken.items():
        free = next(
            (
                candidate
                for candidate in range(port + 10, 65536)
                if candidate not in chosen and is_free(HOST, candidate)
            ),
            0,
        )
        chosen.add(free)
        others.append(f"{flag}={free or 'N'}")
    flags = " ".join(others)
    # make tells its commands how deep it is nested, by this name.
    command = f'make demo ARGS="{flags}"' if "MAKELEVEL" in os.environ else f"conch demo {flags}"
    raise unavailable(f"{holders}; choose others: {command}")


@contextmanager
def running(command: list[str], log: Path) -> Iterator[GuardedServer]:
    """The command as a process, ended when the context is left, by SIGTERM too."""
    before = signal.signal(signal.SIGTERM, _end)
    log.unlink(missing_ok=True)
    try:
        with closing(GuardedServer(command, log)) as server:
            yield server
    finally:
        signal.signal(signal.SIGTERM, before)


def wait_until_ready(client: DemoClient, server: GuardedServer, log: Path, console: Console) -> None:
    """Return when all models are loaded, saying when each is; raises INTERNAL when the server gives up."""
    deadline = time.monotonic() + START_SECONDS
    progress = LoadProgress(time.monotonic())
    while not client.ready(timeout=TIMEOUT):
        for line in progress.lines(client.loaded(), time.monotonic()):
            _say(console, line)
        if message := server.exit_message:
            raise internal(f"{' '.join(message.split())} (see {log})")
        if time.monotonic() > deadline:
            raise internal(f"the models were not loaded after {START_SECONDS} s (see {log})")
        time.sleep(0.1)


class LoadProgress:
    """What is said while models load: each that is loaded, and after some silence which are not yet."""

    def __init__(self, now: float) -> None:
        self._begun = self._said = now
        self._loaded: set[str] = set()

    def lines(self, loaded: set[str], now: float) -> Iterator[str]:
        """The lines for the models that are ``loaded`` at the time ``now`` (s)."""
        told = [f"{name} is loaded" for name in SERVED if name in loaded - self._loaded]
        self._loaded |= loaded
        if not told and now - self._said >= SILENCE_SECONDS:
            told = [f"still loading {', '.join(name for name in SERVED if name not in self._loaded)}"]
        for line in told:
            self._said = now
            yield f"{now - self._begun:5.1f} s  {line}"


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def show_models(client: DemoClient, console: Console) -> None:
    states = {entry["name"]: entry for entry in client.models(timeout=TIMEOUT)}
    rows = []
    for name, purpose in SERVED.items():
        entry = states.get(name, {})
        rows.append(Row([name, entry.get("version", "-"), entry.get("state", "missing"), purpose]))
    columns = [Column(heading) for heading in ("Model", "Version", "State", "")]
    terminal.show(console, Table("Serving", columns, rows))
    console.print()


def show_commands(console: Console, http_port: int, metrics_port: int) -> None:
    models = f"http://localhost:{http_port}/v2/models"
    lines = (
        f'curl {models}/minilm/generate -d \'{{"text_input": "Hello"}}\'',
        f'curl -N {models}/smollm2/generate_stream -d \'{{"text_input": "Once upon a time", "stream": true}}\'',
        f"curl http://localhost:{http_port}/v1/chat/completions -d "
        '\'{"model": "smollm2", "messages": [{"role": "user", "content": "Who are you?"}]}\'',
        f"curl http://localhost:{metrics_port}/metrics",
    )
    console.print("[bold]Try[/bold]")
    for line in lines:
        _say(console, line)


def keep_serving(server: GuardedServer, console: Console) -> None:
    """Return on Ctrl+C; raises INTERNAL when the server ends before."""
    try:
        console.print("\nServing until Ctrl+C.")
        server.wait()
    except KeyboardInterrupt:
        return
    raise internal(server.exit_message)


def _end(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)
