"""While a worker of a text model reads one request, it goes on with frames."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from conch.backends.base.arrays import Request
from conch.backends.generation import generation_backend
from conch.backends.generation.generation_backend import LONG_REQUEST, GenerationBackend
from conch.backends.generation.service import RequestState, ResponseBuilder
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.core.errors import Code, ConchError
from conch.core.tensors import WireTensor, pack_bytes
from tests.unit.backends.generation.fake_engine import ByteTokenizer, FakeEngine
from tests.unit.checkpoints.gguf_files import write_model


class Service:
    """Notes what it is calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def submit(self, state: RequestState) -> None:
        self.calls.append(("submit", state.request.serial))

    def cancel(self, serial: int) -> None:
        self.calls.append(("cancel", serial))


class Backend(GenerationBackend):
    """Does something ``meanwhile``, when it reads a request."""

    def __init__(self) -> None:
        super().__init__(None, {"model": {"name": "m"}, "config": "{}", "log": {}})  # type: ignore[arg-type]
        self.service = Service()
        self._service = self.service  # type: ignore[assignment]
        self.meanwhile: Callable[[], object] = lambda: None
        self.passed_on = 0
        self.before_computing = self.pass_on

    def pass_on(self) -> None:
        self.passed_on += 1

    def complete(self) -> str:
        return "{}"

    def load(self, instance: Mapping[str, Any]) -> None:
        pass

    def receive(self, fields: Mapping[str, Any], unpacker: Any) -> Request:
        text = WireTensor("text_input", "BYTES", (1,), pack_bytes([b"a" * fields["length"]]))
        return Request({"text_input": text}, frozenset(), serial=fields["serial"])

    def response_builder(self, request: Request) -> ResponseBuilder:
        self.meanwhile()
        return None  # type: ignore[return-value]

    def ask(self, length: int = 1) -> None:
        self.execute({"batch": 1, "requests": [{"serial": 7, "length": length}]}, bytearray())


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    monkeypatch.setattr("conch.backends.generation.generation_backend.BorrowingUnpacker", lambda payload, channel: None)
    return Backend()


@pytest.mark.parametrize(
    ("values", "warnings"),
    [
        ({}, []),
        (
            {"lora_modules": {"pirate": "pirate"}},
            [
                "engine 'transformers' serves it, since OpenVINO GenAI ignores LoRA adapters of a GGUF file; engine "
                "'llamacpp' may compute its weights as they are"
            ],
        ),
    ],
)
def test_an_engine_that_the_file_makes_necessary_is_told(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], warnings: list[str]
) -> None:
    calls: list[str] = []
    opened: list[str] = []
    monkeypatch.setattr(backend, "warn_of", calls.append)
    monkeypatch.setattr(generation_backend, "open_engine", lambda name, spec: opened.append(name) or FakeEngine())
    write_model(tmp_path / "m.gguf")
    (tmp_path / "pirate").mkdir()
    checkpoint = Checkpoint.open(tmp_path, Options.from_values({"verify_on_load": False, **values}))
    backend.open_engine(checkpoint, {"kind": "CPU", "device_id": 0}, ByteTokenizer(), lambda name: {})
    assert (opened, calls) == (["transformers" if warnings else "openvino"], warnings)


def test_an_engine_is_opened_and_checked_in_threads_that_end(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers: list[threading.Thread] = []

    def called(result: Any) -> Callable[..., Any]:
        return lambda *_: callers.append(threading.current_thread()) or result

    monkeypatch.setattr(generation_backend, "open_engine", called(FakeEngine()))
    monkeypatch.setattr(generation_backend, "verify", called({"gguf_check": "exact"}))
    write_model(tmp_path / "m.gguf")
    checkpoint = Checkpoint.open(tmp_path, Options.from_values({}))
    backend.open_engine(checkpoint, {"kind": "CPU", "device_id": 0}, ByteTokenizer(), lambda name: {})
    assert backend.runtime_facts["gguf_check"] == "exact"
    assert [caller.is_alive() for caller in callers] == [False, False]


def test_another_thread_goes_on_while_a_long_text_is_read(backend: Backend) -> None:
    backend.ask()
    assert backend.passed_on == 0
    backend.ask(LONG_REQUEST)
    assert backend.passed_on == 1


def test_what_is_given_up_while_it_is_read_does_not_run(backend: Backend) -> None:
    backend.meanwhile = lambda: backend.cancel(7)
    with pytest.raises(ConchError, match="Request was cancelled") as caught:
        backend.ask()
    assert caught.value.code is Code.CANCELLED
    assert backend.service.calls == []


def test_what_is_given_up_later_is_the_engines(backend: Backend) -> None:
    backend.ask()
    backend.cancel(7)
    backend.cancel(8)
    assert backend.service.calls == [("submit", 7), ("cancel", 7), ("cancel", 8)]


def test_what_cannot_be_read_is_forgotten(backend: Backend) -> None:
    backend.meanwhile = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        backend.ask()
    backend.cancel(7)
    assert backend.service.calls == [("cancel", 7)]
