"""A server that runs already is left as it was, whatever goes wrong; it has nothing but models and their control."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from conch.core.errors import ConchError, internal
from conch.measure.analyze.servers import ControlClient, RemoteServer, ServerGone, ServerLost
from conch.measure.perf.senders.channels.connecting import Address

HERE = Address("localhost", 8001)


class FakeControl(ControlClient):
    """A server with the models ``a``, ``b`` and ``c``, of which some are loaded and some ``broken`` do not load."""

    def __init__(self, loaded: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(HERE, timeout=0.0)
        self.loaded = {model: dict(config) for model, config in loaded.items()}
        self.broken: set[str] = set()
        self.gone = False

    def config(self, model: str) -> Mapping[str, Any]:
        self._answer()
        if model not in self.loaded:
            raise internal(f"'{model}' is not loaded")
        return self.loaded[model]

    def load(self, model: str, config: Mapping[str, Any] | None = None) -> None:
        self._answer()
        if model in self.broken:
            self.loaded.pop(model, None)
            raise internal(f"load '{model}': it does not fit")
        self.loaded[model] = dict(config or {"max_batch_size": 1})

    def request_unload(self, model: str) -> None:
        self._answer()
        self.loaded.pop(model, None)

    def index(self) -> Iterable[Mapping[str, Any]]:
        self._answer()
        return [{"name": model, "state": "READY" if model in self.loaded else "UNAVAILABLE"} for model in "abc"]

    def _answer(self) -> None:
        if self.gone:
            raise ServerGone("no server responds")


def test_models_are_loaded_as_they_were_and_others_unloaded() -> None:
    own = {"max_batch_size": 7}
    control = FakeControl({"a": own, "c": {}})

    with RemoteServer(control, HERE, ["a", "b"]) as server:
        server.load({"a": {"max_batch_size": 4}})
        assert control.loaded["a"]["max_batch_size"] == 4 and "b" in control.loaded

    assert control.loaded == {"a": own, "c": {}}


def test_one_model_that_cannot_be_restored_does_not_keep_the_others_from_it() -> None:
    control = FakeControl({"a": {"max_batch_size": 7}, "b": {"max_batch_size": 8}})
    server = RemoteServer(control, HERE, ["a", "b", "c"])
    control.broken = {"a"}

    with pytest.raises(ConchError, match=r"could not restore its original models: 'a': load 'a': it does not fit"):
        server.close()
    assert control.loaded == {"b": {"max_batch_size": 8}}


def test_a_server_is_left_as_it_was_where_a_model_does_not_load_at_all() -> None:
    own = {"max_batch_size": 7}
    control = FakeControl({"a": own})
    control.broken = {"b"}

    with pytest.raises(ConchError, match="'b': it does not fit"):
        RemoteServer(control, HERE, ["a", "b"])
    assert control.loaded == {"a": own}


def test_a_server_that_does_not_come_back_is_lost() -> None:
    control = FakeControl({"a": {}})
    server = RemoteServer(control, HERE, ["a"])
    control.gone = True

    with pytest.raises(ServerLost, match="no server responds"):
        server.restart()
    control.gone = False
    server.restart()


def test_a_server_that_does_not_respond_is_named_with_the_reason() -> None:
    with pytest.raises(ServerGone, match="no server responds at localhost:9: no connection: Connection refused"):
        ControlClient(Address("localhost", 9), timeout=5.0).known()  # no listener
