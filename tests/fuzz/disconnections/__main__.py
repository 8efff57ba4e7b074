"""``python -m tests.fuzz.disconnections [--seconds 120] [--seed N]``; exits with 1 if anything is left of a request."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Final

from tests.fuzz.disconnections import aftermath
from tests.fuzz.disconnections.clients import Clients
from tests.fuzz.disconnections.faults import Faults, ask
from tests.fuzz.disconnections.repository import LARGE, RandomRequests, write_repository
from tests.servers import ConchServer

_FLAGS: Final = (
    "--allow-client-shm=true", "--cache-config=local,size=4194304", "--console", "--max-bytes-in-flight=33554432",
    "--rate-limit=execution_count", "--rate-limit-resource=R:1", "--load-wait-secs=60",
)  # fmt: skip
MODES: Final = {
    "explicit": ("--model-control-mode=explicit", "--load-model=*"),
    "on-demand": ("--model-control-mode=on-demand", "--max-loaded-models=8"),
}


@contextmanager
def regions(server: ConchServer) -> Iterator[list[str]]:
    """Register regions of shared memory and yield their names; unregister them afterwards."""
    memory = [SharedMemory(create=True, size=4 * LARGE) for _ in range(2)]
    names = [f"region{number}" for number in range(len(memory))]
    try:
        for name, block in zip(names, memory, strict=True):
            body = {"key": f"/{block.name}", "offset": 0, "byte_size": 4 * LARGE}
            status, reply = ask(server, f"/v2/systemsharedmemory/region/{name}/register", body)
            assert status == 200, reply
        yield names
        ask(server, "/v2/systemsharedmemory/unregister", {})
    finally:
        for block in memory:
            block.close()
            block.unlink()


async def disturb(
    server: ConchServer, repository: Path, seed: int, seconds: float, count: int, names: list[str]
) -> list[str]:
    """Run clients and faults for a time; return what clients waited for in vain."""
    chance = random.Random(seed)
    requests = RandomRequests(random.Random(chance.random()), names)
    clients = Clients(server.http, server.grpc, requests, random.Random(chance.random()))
    faults = Faults(server, repository, random.Random(chance.random()), seconds=2.0)
    clients.start(count)
    faults.start()
    await asyncio.sleep(seconds)
    await faults.stop()
    await clients.stop()
    print(
        f"sent: {clients.sent.total()} over HTTP; responses: {dict(clients.statuses)}; faults: {dict(faults.done)}",
        flush=True,
    )
    return [f"no response: {request}" for request in clients.hung]


def run(folder: Path, mode: str, seed: int, seconds: float, count: int) -> list[str]:
    """Disturb a server; return what is wrong afterwards."""
    repository, log = folder / "models", folder / "log"
    server = ConchServer(repository, *_FLAGS, *MODES[mode], log=log)
    write_repository(folder, server.http, server.grpc)
    names = sorted(path.name for path in repository.iterdir())
    with server:
        load_all(server, names)
        before = aftermath.responses(server)
        quiet = aftermath.usage(server)
        with regions(server) as shared:
            problems = asyncio.run(disturb(server, repository, seed, seconds, count, shared))
        problems += aftermath.until_empty(lambda: aftermath.busy_gauges(server))
        load_all(server, names)
        after = aftermath.responses(server)
        problems += [
            f"{name}: {after[name]} instead of {before[name]}" for name in before if after[name] != before[name]
        ]
        problems += aftermath.until_empty(lambda: aftermath.more_used(server, quiet))
        for name in names:
            ask(server, f"/v2/repository/models/{name}/unload", {})
        problems += aftermath.until_empty(lambda: aftermath.still_loaded(server, names))
        problems += aftermath.until_empty(lambda: aftermath.remaining_workers(server))
        problems += aftermath.until_empty(lambda: aftermath.busy_gauges(server))
        assert server.process is not None
        if server.process.poll() is not None:
            problems.append(f"the server ended with {server.process.poll()}")
    return [*problems, *aftermath.unexpected_lines(log.read_text())]


def load_all(server: ConchServer, names: list[str]) -> None:
    """Load the models that are not ready, and the adapters."""
    aftermath.until_empty(lambda: aftermath.models_not_ready(server, names), 5)
    for name in aftermath.models_not_ready(server, names):
        status, body = ask(server, f"/v2/repository/models/{name}/load", {})
        assert status == 200, (name, body)
    for name in ("a0", "a1"):
        body = {"lora_name": name, "lora_path": name, "load_inplace": True, "base_model_name": "writer"}
        status, reply = ask(server, "/v1/load_lora_adapter", body)
        assert status == 200, reply


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.disconnections", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120, help="for each mode")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--clients", type=int, default=12, help="of each protocol")
    parser.add_argument("--mode", action="append", choices=MODES, help="of model control; default: all")
    parser.add_argument("--keep", type=Path, help="write models and log here")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    failed = False
    for mode in arguments.mode or MODES:
        with tempfile.TemporaryDirectory() as temporary:
            folder = (arguments.keep or Path(temporary)) / mode
            folder.mkdir(parents=True)
            problems = run(folder, mode, arguments.seed, arguments.seconds, arguments.clients)
        print(f"{mode}:", "\n".join(problems) or "nothing is left of any request", flush=True)
        failed = failed or bool(problems)
    return failed


if __name__ == "__main__":
    sys.exit(main())
