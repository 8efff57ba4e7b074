"""An ingress over replicas that come, change and go."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import conch
from conch.core.errors import ConchError
from conch.deploy.ray.ingress import IngressServer, IngressSpec, cluster_models
from tests.conformance.raw import post, tensor
from tests.models import build
from tests.unit.deploy.ray.servers import record, serving, write_echo

FREE = {"http_port": 0, "grpc_port": 0, "allow_metrics": False, "http_address": "127.0.0.1"}
NAMES = ("echo", "a b.c", "Grüße%2F#?")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[conch.Server]:
    repository = tmp_path_factory.mktemp("first")
    for name in NAMES:
        write_echo(repository, name, "first")
    with serving(repository, model_control_mode="explicit", load_model="*") as server:
        yield server


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[conch.Server]:
    repository = tmp_path_factory.mktemp("second")
    write_echo(repository, "echo", "second", 'input { name: "MORE" data_type: TYPE_INT32 dims: 1 optional: true }')
    with serving(repository) as server:
        yield server


class Ingress:
    """An ingress, and a client of it."""

    def __init__(self, server: IngressServer, addresses: dict[str, tuple[str, int]]) -> None:
        self.server = server
        self.url = "http://{}:{}".format(*addresses["http"])
        self._client = conch.Client(self.url)

    def __getattr__(self, name: str) -> Any:
        """A call of the client's, in a thread."""
        return partial(asyncio.to_thread, getattr(self._client, name))

    async def follow(self, *replicas: Any) -> None:
        await self.server.follow(cluster_models(replicas))

    async def ask(self, name: str = "echo", text: str = "hello") -> str:
        found = await self.infer(name, {"text_input": [text]})
        answer: str = found["OUT"].flat[0].decode()
        return answer

    async def inputs(self) -> list[str]:
        return [one["name"] for one in (await self.metadata("echo"))["inputs"]]


@asynccontextmanager
async def ingress(*expected: str, shared: bool = False, **options: Any) -> AsyncIterator[Ingress]:
    server = IngressServer(IngressSpec(shared, 1, {**FREE, **options}))
    found = Ingress(server, await server.start())
    try:
        await server.expect(expected)
        yield found
    finally:
        await found.close()
        await server.stop()


async def ready(ingress: Ingress, name: str = "echo") -> None:
    """Wait until the ingress reaches a server of the model."""
    async with asyncio.timeout(30):
        while not await ingress.ready(name):
            await asyncio.sleep(0.001)


async def test_it_is_ready_when_every_model_has_a_replica(first: conch.Server) -> None:
    async with ingress("echo", "a b.c") as here:
        assert await here.live() and not await here.ready()
        await here.follow(record("a", first, "echo"))
        assert not await here.ready()
        await here.follow(record("a", first, "echo"), record("b", first, "a b.c"))
        assert await here.ready()
        assert await here.ask() == "first hello"


async def test_it_serves_nothing_before_it_is_told_what_to_expect(first: conch.Server) -> None:
    async with ingress() as here:
        await here.follow(record("a", first, "echo"))
        assert not await here.ready()


async def test_models_may_have_any_name_that_a_folder_may_have(first: conch.Server) -> None:
    async with ingress(*NAMES) as here:
        await here.follow(record("a", first, *NAMES))
        assert await here.ready()
        for name in NAMES:
            assert await here.ask(name) == "first hello"


async def test_classes_have_the_labels_of_the_replicas(tmp_path: Path) -> None:
    with serving(build(tmp_path / "models", "classify")) as server:
        async with ingress("classify") as here:
            await here.follow(record("a", server, "classify"))
            values = tensor("INPUT", "FP32", [0.5, 2.0, 1.0, 0.0], [1, 4])
            outputs = [{"name": "OUTPUT", "parameters": {"classification": 2}}]
            body = {"inputs": [values], "outputs": outputs}
            path = "/v2/models/classify/infer"
            directly = await asyncio.to_thread(post, server.urls["http"].removeprefix("http://"), path, body)
            through = await asyncio.to_thread(post, here.url.removeprefix("http://"), path, body)
            assert directly.json()["outputs"][0]["data"][0].count(":") == 2
            assert through.json()["outputs"] == directly.json()["outputs"]


async def test_unexpected_paths_are_not_served(first: conch.Server) -> None:
    async with ingress("echo") as here:
        await here.follow(record("a", first, "echo", "a b.c"))
        assert [model["name"] for model in await here.models()] == ["echo"]


async def test_requests_go_where_replicas_are_now(first: conch.Server, tmp_path: Path) -> None:
    write_echo(tmp_path, word="moved")
    async with ingress("echo") as here:
        await here.follow(record("a", first, "echo"))
        with serving(tmp_path) as moved:
            await here.follow(record("a", first, "echo"), record("b", moved, "echo"))
            await here.follow(record("b", moved, "echo"))
            await ready(here)
            assert await here.ask() == "moved hello"


async def test_a_model_without_replicas_is_refused_until_there_is_one(first: conch.Server) -> None:
    async with ingress("echo") as here:
        await here.follow(record("a", first, "echo"))
        await here.follow()
        with pytest.raises(ConchError, match="it has no servers"):
            await here.ask()
        assert not await here.ready("echo")
        await here.follow(record("b", first, "echo"))
        await ready(here)
        assert await here.ask() == "first hello"


async def test_a_model_that_takes_something_else_is_loaded_again(first: conch.Server, second: conch.Server) -> None:
    async with ingress("echo") as here:
        old, new = record("a", first, "echo"), record("b", second, "echo", started=1)
        await here.follow(old)
        assert await here.inputs() == ["text_input"]
        await here.follow(old, new)
        assert await here.inputs() == ["text_input", "MORE"]
        assert {await here.ask(text=str(number)) for number in range(4)} == {f"second {n}" for n in range(4)}
        await here.follow(old)  # the new ones have gone again
        assert await here.inputs() == ["text_input"]
        assert await here.ask() == "first hello"


async def test_a_model_that_is_no_longer_expected_is_gone_and_may_come_back(first: conch.Server) -> None:
    async with ingress("echo", "a b.c") as here:
        replica = record("a", first, "echo", "a b.c")
        await here.follow(replica)
        await here.server.expect(["a b.c"])
        await here.follow(replica)
        with pytest.raises(ConchError, match="unknown model"):
            await here.ask()
        assert await here.ask("a b.c") == "first hello"
        await here.server.expect(["echo", "a b.c"])
        await here.follow(replica)
        assert await here.ask() == "first hello"


async def test_what_is_expected_may_change_while_it_follows(
    first: conch.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with ingress("echo", "a b.c") as here:
        replica = record("a", first, "echo", "a b.c")
        await asyncio.gather(
            here.follow(replica), here.server.expect(["echo"]), here.follow(replica), here.server.expect(["echo"])
        )
        assert [model["name"] for model in await here.models() if model.get("state") == "READY"] == ["echo"]
        [repository] = tmp_path.iterdir()
        assert [folder.name for folder in repository.iterdir()] == ["echo"]


async def test_models_that_share_replicas_are_loaded_when_they_are_asked_for(tmp_path: Path) -> None:
    for name in ("echo", "other"):
        write_echo(tmp_path, name)
    with serving(tmp_path, model_control_mode="on-demand", max_loaded_models=1) as pool:
        replica = record("a", pool, "echo", "other", loaded=False)
        async with ingress("echo", "other", shared=True) as here:
            await here.follow(replica)
            assert await here.ready()
            assert not [model for model in pool.models() if model.get("state") == "READY"]
            for name in ("echo", "other", "echo"):
                assert await here.ask(name) == "echo hello"


async def test_models_that_share_replicas_are_asked_for_where_these_are_now(
    first: conch.Server, second: conch.Server
) -> None:
    async with ingress("echo", shared=True) as here:
        await here.follow(record("a", first, "echo", loaded=False))
        await here.follow(record("b", second, "echo", loaded=False))
        assert await here.ask() == "second hello"


async def test_a_model_that_was_replaced_on_shared_replicas_takes_what_it_takes_now(
    first: conch.Server, second: conch.Server
) -> None:
    async with ingress("echo", shared=True) as here:
        await here.follow(record("a", first, "echo", loaded=False))
        assert await here.ask() == "first hello"
        assert await here.inputs() == ["text_input"]
        await here.follow(record("b", second, "echo", loaded=False))
        assert await here.ask() == "second hello"
        assert await here.inputs() == ["text_input", "MORE"]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary folders."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


async def test_a_port_in_use_is_reported_in_one_sentence_and_nothing_remains(temporary: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = IngressServer(IngressSpec(options={**FREE, "http_port": port}))
        with pytest.raises(ConchError, match=f"'127.0.0.1:{port}' already in use by .*: choose another port"):
            await server.start()
    assert list(temporary.iterdir()) == []


async def test_options_that_are_wrong_leave_nothing(temporary: Path) -> None:
    with pytest.raises(ConchError, match="no option 'http_prt'"):
        IngressServer(IngressSpec(options={"http_prt": 1}))
    server = IngressServer(IngressSpec(options={**FREE, "debug": "nothing"}))
    with pytest.raises(ConchError, match="--debug names a model that is missing"):
        await server.start()
    assert list(temporary.iterdir()) == []


async def test_it_leaves_nothing_when_it_stops_and_follows_no_more(first: conch.Server, temporary: Path) -> None:
    async with ingress("echo") as here:
        await here.follow(record("a", first, "echo"))
    assert list(temporary.iterdir()) == []
    await here.follow(record("a", first, "a b.c"))
    assert list(temporary.iterdir()) == []


async def test_it_leaves_nothing_when_it_stops_while_it_follows(first: conch.Server, temporary: Path) -> None:
    server = IngressServer(IngressSpec(options=dict(FREE)))
    await server.start()
    await server.expect(["echo"])
    models = cluster_models([record("a", first, "echo")])
    await asyncio.gather(server.follow(models), server.stop(), server.follow(models), return_exceptions=True)
    assert list(temporary.iterdir()) == []


async def test_a_model_that_cannot_be_served_takes_no_other_away(first: conch.Server) -> None:
    async with ingress("echo", "a b.c", exit_on_error="true") as here:
        found = cluster_models([record("a", first, "echo", "a b.c")])
        await here.server.follow({**found, "a b.c": replace(found["a b.c"], config='backend: "no such backend"')})
        assert await here.ask() == "first hello"
        assert not await here.ready("a b.c")
        await here.server.follow(found)  # it is mended
        assert await here.ask("a b.c") == "first hello"
