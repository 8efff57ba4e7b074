"""The servers of the comparison; each is a column of its tables. While one is measured, the others are stopped."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.generation import weights
from benchmarks.generation.client import Target
from benchmarks.peers import environment, llama, tutorial
from benchmarks.peers.servers import LlamaServer, TransformersServer, VllmServer
from conch.checkpoints.options import TEXT_ENGINES
from conch.cli.interrupting import signals_as_ctrl_c
from tests.oracle import OracleUnavailable, TritonServer
from tests.servers import ConchServer

MODEL: Final = "smollm2"
#: The weights that conch serves.
CHECKPOINTS: Final = {"gguf": weights.gguf, "folder": weights.folder}
WEIGHTS: Final = {"gguf": "Q4_1, the GGUF file", "folder": "bfloat16, unpacked from the GGUF file"}
#: The description of each server by name.
PEERS: Final = {
    "triton": "Triton 2.51, the tutorial's pipeline, bfloat16, batches of at most 8, not streamed",
    "transformers": "transformers serve, bfloat16, continuous batching",
    "transformers-plain": "transformers serve, bfloat16, one request after the other",
    "llama.cpp": "llama-server, Q4_1, 32 slots, continuous batching",
    "vllm": "vllm serve, bfloat16; run the benchmark in .venv-vllm, with --engine vllm",
    "genai": "OpenVINO GenAI in one process, without a server, Q4_1, its defaults; throughput only",
}
#: The default selection; ``transformers-plain`` takes minutes at high concurrency.
USUAL: Final = ("triton", "transformers", "llama.cpp")
MAX_BATCH: Final = 8
SLOTS: Final = 32
#: The KV cache of vLLM (GiB).
VLLM_CACHE: Final = 2
#: The tokens of a llama.cpp slot; no request here is longer.
CONTEXT: Final = 1280


@dataclass(frozen=True, slots=True)
class Column:
    """A running server; ``pid`` is the root of its processes, ``checkpoint`` its model, ``engine`` the engine requested
    from conch (``ours``). Without ``served``, the engine runs in a process of its own when it is measured."""

    name: str
    about: str
    target: Target
    pid: int
    ours: bool = False
    checkpoint: Path = Path()
    engine: str = "auto"
    served: bool = True

    @property
    def schemas(self) -> bool:
        return self.target.speaks().schemas

    @property
    def streams(self) -> bool:
        return self.target.speaks().streams

    def tree(self) -> list[psutil.Process]:
        """Return the server's processes, parents first."""
        if not self.served:
            return []
        root = psutil.Process(self.pid)
        return [root, *root.children(recursive=True)]

    def stop(self) -> None:
        """Stop the server's processes until :meth:`go`."""
        for process in self.tree():
            process.send_signal(signal.SIGSTOP)

    def go(self) -> None:
        """Resume the server's processes, children first, so that no parent waits for a stopped child."""
        for process in reversed(self.tree()):
            process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def start(conch: Sequence[str], engine: str, peers: Sequence[str], home: Path) -> Iterator[list[Column]]:
    """Start all servers, ready and stopped, with repositories and logs below ``home``; ``conch`` names checkpoints
    (of ``CHECKPOINTS``, or paths), with ``:NAME`` for another engine than ``engine``.

    SIGTERM and SIGHUP end the context as Ctrl+C does: stopped servers would otherwise outlive this process.
    """
    with signals_as_ctrl_c(), contextlib.ExitStack() as running:
        columns: list[Column] = []

        def add(column: Column) -> None:
            # A stopped process does not handle the signal to end.
            running.callback(column.go)
            column.stop()
            columns.append(column)

        for model in conch:
            number = len(columns)
            name, chosen = _with_engine(model, engine)
            checkpoint = CHECKPOINTS[name]() if name in CHECKPOINTS else Path(name).resolve()
            write(home / f"conch-{number}", checkpoint, chosen)
            log = home / f"conch-{number}.log"
            variables = {"VLLM_CPU_KVCACHE_SPACE": str(VLLM_CACHE)}
            server = _entered(running, ConchServer(home / f"conch-{number}", log=log, env=variables), log)
            weights_of = WEIGHTS.get(name, str(checkpoint))
            about = f"{weights_of}, {'its own choice of engine' if chosen == 'auto' else chosen}"
            target = Target(server.http, "conch", MODEL)
            label = f"conch {Path(model).name}"
            add(Column(label, about, target, server.process.pid, ours=True, checkpoint=checkpoint, engine=chosen))
        for name in peers:
            log = home / f"{name}.log"
            if name == "genai":
                target = Target("", "conch", MODEL)
                columns.append(
                    Column(name, PEERS[name], target, 0, checkpoint=weights.gguf(), engine=name, served=False)
                )
                continue
            try:
                peer = _peer(name, home, log)
            except OracleUnavailable as reason:
                print(f"Not compared with {name}: {reason}", file=sys.stderr)
                continue
            server = _entered(running, peer, log)
            dialect, model = _PROTOCOLS[name]
            target = Target(server.http, dialect, model or str(weights.folder()))
            add(Column(name, PEERS[name], target, server.process.pid))
        yield columns


def _with_engine(model: str, default: str) -> tuple[str, str]:
    """Return the checkpoint and the engine of ``CHECKPOINT[:ENGINE]``."""
    name, _, engine = model.rpartition(":")
    return (name, engine) if name and engine in TEXT_ENGINES else (model, default)


#: For each peer, its dialect and the name of its model (empty: the folder's path).
_PROTOCOLS: Final = {
    "triton": ("triton", MODEL),
    "transformers": ("openai", ""),
    "transformers-plain": ("openai", ""),
    "llama.cpp": ("llama", MODEL),
    "vllm": ("openai", ""),
}


def _peer(name: str, home: Path, log: Path) -> Any:
    match name:
        case "triton":
            repository = home / "triton"
            tutorial.write(repository, MODEL, weights.folder(), MAX_BATCH)
            return TritonServer(repository, python=environment.python(), log=log)
        case "llama.cpp":
            return LlamaServer(llama.server(), weights.gguf(), slots=SLOTS, context=CONTEXT, log=log)
        case "vllm":
            return VllmServer(weights.folder(), cache=VLLM_CACHE, log=log)
    continuous = name == "transformers"
    return TransformersServer(environment.python(), weights.folder(), continuous=continuous, log=log)


def _entered(running: contextlib.ExitStack, server: Any, log: Path) -> Any:
    """Enter a server's context; raises RuntimeError with the end of its log if it does not become ready."""
    try:
        return running.enter_context(server)
    except (RuntimeError, TimeoutError) as error:
        tail = log.read_text(errors="replace")[-1500:] if log.exists() else ""
        raise RuntimeError(f"{log.stem}: {error}\n{tail}") from None


def write(repository: Path, checkpoint: Path, engine: str) -> None:
    """Write conch's model: the checkpoint and its task; conch chooses everything else."""
    directory = repository / MODEL
    (directory / "1").mkdir(parents=True)
    values = {"model": str(checkpoint), "task": "text-generation"}
    if engine != "auto":
        values["engine"] = engine
    lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in values.items()]
    config = ['backend: "huggingface"', *lines, "instance_group { kind: KIND_CPU }", ""]
    (directory / "config.pbtxt").write_text("\n".join(config))
