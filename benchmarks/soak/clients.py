"""The clients of the soak: threads that ask, over HTTP and gRPC, and check what they get."""

from __future__ import annotations

import random
import re
import threading
from time import monotonic
from typing import Any, Final

import numpy as np
import tritonclient.grpc as grpcclient

from benchmarks.soak.asking import PATIENCE, GrpcAsker, HttpAsker
from benchmarks.soak.numbers import NumberClients, relay
from benchmarks.soak.outcomes import Outcomes
from benchmarks.soak.repository import MARK

_WORDS: Final = ("the", "market", "morning", "station", "is", "open", "library", "near")


class Clients:
    """``http`` and ``grpc`` addresses of the server; :meth:`stop` ends the threads after the requests under way."""

    def __init__(self, http_address: str, grpc_address: str, outcomes: Outcomes, seed: int) -> None:
        self._grpc = grpc_address
        self._asker = HttpAsker(http_address, outcomes)
        self._numbers = NumberClients(self._asker)
        self._outcomes = outcomes
        self._stopped = threading.Event()
        self._expected: dict[str, Any] = {}
        self._threads: list[threading.Thread] = []
        self._seed = seed

    def start(self, count: int) -> None:
        """Ask with ``count`` threads; a quarter of them use gRPC."""
        self._expected = {text: self._embedding(text) for text in _texts(random.Random(1))}
        self._written = self._asker.post("/v2/models/writer/generate", self._writing())[1]["text_output"]
        for number in range(count):
            run = self._run_grpc if number % 4 == 3 else self._run_http
            thread = threading.Thread(target=run, args=(random.Random(self._seed + number),), daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> int:
        """How many threads still wait for an answer when all should have had one."""
        self._stopped.set()
        until = monotonic() + PATIENCE + 10
        for thread in self._threads:
            thread.join(max(0.0, until - monotonic()))
        return sum(thread.is_alive() for thread in self._threads)

    # HTTP

    def _run_http(self, chance: random.Random) -> None:
        numbers = self._numbers
        kinds = (self._echo, self._embed, self._generate, numbers.triple, numbers.sum, numbers.share)
        weights = (8, 4, 1, 6, 2, 2)
        while not self._stopped.is_set():
            chance.choices(kinds, weights)[0](chance)
        numbers.end()

    def _echo(self, chance: random.Random) -> None:
        model = chance.choice(("echo", "echo", "other", "twice", "spare"))
        text = f"text {chance.random()} " * chance.choice((1, 1, 1, 3000))

        def check(response: Any) -> str:
            got = response["outputs"][0]["data"]
            right = len(got) == 1 and _is_marked(got[0], text, 2 if model == "twice" else 1)
            return "" if right else f"answered {got!s:.200}"

        self._asker.ask(model, f"/v2/models/{model}/infer", _text_body(text), check)

    def _embed(self, chance: random.Random) -> None:
        text = chance.choice(list(self._expected))

        def check(response: Any) -> str:
            close = np.allclose(_first(response), self._expected[text], atol=1e-4)
            return "" if close else "another embedding than alone"

        self._asker.ask("encoder", "/v2/models/encoder/infer", _text_body(text, "text_input"), check)

    def _generate(self, chance: random.Random) -> None:
        expected = self._written
        self._asker.ask(
            "writer",
            "/v2/models/writer/generate",
            self._writing(),
            lambda response: "" if response["text_output"] == expected else f"wrote {response['text_output']!r:.200}",
        )

    def _embedding(self, text: str) -> Any:
        return _first(self._asker.post("/v2/models/encoder/infer", _text_body(text, "text_input"))[1])

    @staticmethod
    def _writing() -> dict[str, Any]:
        return {"text_input": "Where is the station?", "max_tokens": 16, "temperature": 0}

    # gRPC

    def _run_grpc(self, chance: random.Random) -> None:
        while not self._stopped.is_set():
            with grpcclient.InferenceServerClient(self._grpc) as client:
                asker = GrpcAsker(client, self._outcomes)
                for _ in range(200):
                    if self._stopped.is_set():
                        return
                    kind = chance.choices((self._echo_grpc, self._repeat, relay), (8, 1, 2))[0]
                    if not kind(asker, chance):
                        break

    def _echo_grpc(self, asker: GrpcAsker, chance: random.Random) -> bool:
        text = f"text {chance.random()}"
        tensor = grpcclient.InferInput("TEXT", [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[text]], object))

        def check(result: Any) -> str:
            got = result.as_numpy("ANSWER")[0, 0].decode()
            return "" if _is_marked(got, text, 1) else f"answered {got:.200}"

        return asker.infer("echo", tensor, check)

    def _repeat(self, asker: GrpcAsker, chance: random.Random) -> bool:
        values = np.arange(chance.randint(1, 20), dtype=np.int32)
        tensor = grpcclient.InferInput("IN", list(values.shape), "INT32")
        tensor.set_data_from_numpy(values)

        def check(results: list[Any]) -> str:
            got = [int(result.as_numpy("OUT")[0]) for result in results]
            return "" if got == values.tolist() else f"answered {got}"

        return asker.stream("repeat", tensor, check)


def _texts(chance: random.Random) -> list[str]:
    return [" ".join(chance.choices(_WORDS, k=chance.randint(1, 40))) for _ in range(20)]


def _is_marked(text_output: str, text: str, times: int) -> bool:
    """Whether an echo's answer is the text behind as many marks."""
    return (
        text_output.endswith(text) and re.fullmatch(rf"({MARK}\d+ ){{{times}}}", text_output[: -len(text)]) is not None
    )


def _text_body(text: str, name: str = "TEXT") -> dict[str, Any]:
    return {"inputs": [{"name": name, "datatype": "BYTES", "shape": [1, 1], "data": [text]}]}


def _first(response: Any) -> Any:
    return np.array(response["outputs"][0]["data"], np.float32)
