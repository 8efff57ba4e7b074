"""The clients of the soak: threads that ask, over HTTP and gRPC, and check what they get."""

from __future__ import annotations

import http.client
import json
import queue
import random
import re
import threading
import urllib.parse
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any, Final

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from benchmarks.soak.outcomes import Outcomes
from benchmarks.soak.repository import MARK

#: A request without an answer for this long (s) hangs.
PATIENCE: Final = 60.0
_WORDS: Final = ("the", "market", "morning", "station", "is", "open", "library", "near")


class Clients:
    """``http`` and ``grpc`` addresses of the server; :meth:`stop` ends the threads after the requests under way."""

    def __init__(self, http_address: str, grpc_address: str, outcomes: Outcomes, seed: int) -> None:
        self._http, self._grpc = http_address, grpc_address
        self._outcomes = outcomes
        self._stopped = threading.Event()
        self._expected: dict[str, Any] = {}
        self._threads: list[threading.Thread] = []
        self._seed = seed

    def start(self, count: int) -> None:
        """Ask with ``count`` threads; a quarter of them use gRPC."""
        self._expected = {text: self._embedding(text) for text in _texts(random.Random(1))}
        self._written = self._post("/v2/models/writer/generate", self._writing())[1]["text_output"]
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
        while not self._stopped.is_set():
            kind = chance.choices((self._echo, self._embed, self._generate), (12, 4, 1))[0]
            kind(chance)

    def _echo(self, chance: random.Random) -> None:
        model = chance.choice(("echo", "echo", "other", "twice", "spare"))
        text = f"text {chance.random()} " * chance.choice((1, 1, 1, 3000))

        def check(answer: Any) -> str:
            got = answer["outputs"][0]["data"]
            right = len(got) == 1 and _is_marked(got[0], text, 2 if model == "twice" else 1)
            return "" if right else f"answered {got!s:.200}"

        self._ask(model, f"/v2/models/{model}/infer", _text_body(text), check)

    def _embed(self, chance: random.Random) -> None:
        text = chance.choice(list(self._expected))

        def check(answer: Any) -> str:
            close = np.allclose(_first(answer), self._expected[text], atol=1e-4)
            return "" if close else "another embedding than alone"

        self._ask("encoder", "/v2/models/encoder/infer", _text_body(text, "text_input"), check)

    def _generate(self, chance: random.Random) -> None:
        expected = self._written
        self._ask(
            "writer",
            "/v2/models/writer/generate",
            self._writing(),
            lambda answer: "" if answer["text_output"] == expected else f"wrote {answer['text_output']!r:.200}",
        )

    def _embedding(self, text: str) -> Any:
        return _first(self._post("/v2/models/encoder/infer", _text_body(text, "text_input"))[1])

    @staticmethod
    def _writing() -> dict[str, Any]:
        return {"text_input": "Where is the station?", "max_tokens": 16, "temperature": 0}

    def _ask(self, model: str, path: str, body: Any, check: Callable[[Any], str]) -> None:
        begun = monotonic()
        try:
            status, answer = self._post(path, body)
        except TimeoutError:
            self._outcomes.hang(model, monotonic() - begun)
            return
        except (OSError, http.client.HTTPException):
            # Out of descriptors: the server closed the connection, or did not accept it.
            self._outcomes.refuse_connection()
            sleep(0.05)
            return
        seconds = monotonic() - begun
        if status == 200:
            self._outcomes.answer(model, seconds, check(answer))
        else:
            self._outcomes.error(model, seconds, str(status), str(answer.get("error", answer)))
            sleep(0.01)

    def _post(self, path: str, body: Any) -> tuple[int, Any]:
        address = urllib.parse.urlsplit(f"//{self._http}")
        connection = _CONNECTIONS.get(address.port)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        except BaseException:
            connection.close()
            raise

    # gRPC

    def _run_grpc(self, chance: random.Random) -> None:
        while not self._stopped.is_set():
            with grpcclient.InferenceServerClient(self._grpc) as client:
                for _ in range(200):
                    if self._stopped.is_set():
                        return
                    kind = chance.choices((self._echo_grpc, self._repeat), (8, 1))[0]
                    if not kind(client, chance):
                        break

    def _echo_grpc(self, client: grpcclient.InferenceServerClient, chance: random.Random) -> bool:
        text = f"text {chance.random()}"
        tensor = grpcclient.InferInput("TEXT", [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[text]], object))
        begun = monotonic()
        try:
            got = client.infer("echo", [tensor], client_timeout=PATIENCE).as_numpy("ANSWER")[0, 0].decode()
        except InferenceServerException as error:
            return self._failed("echo", begun, error)
        fault = "" if _is_marked(got, text, 1) else f"answered {got:.200}"
        self._outcomes.answer("echo", monotonic() - begun, fault)
        return True

    def _repeat(self, client: grpcclient.InferenceServerClient, chance: random.Random) -> bool:
        values = np.arange(chance.randint(1, 20), dtype=np.int32)
        tensor = grpcclient.InferInput("IN", list(values.shape), "INT32")
        tensor.set_data_from_numpy(values)
        answers: queue.Queue[Any] = queue.Queue()
        begun = monotonic()
        client.start_stream(lambda result, error: answers.put((result, error)), stream_timeout=PATIENCE)
        try:
            client.async_stream_infer("repeat", [tensor], enable_empty_final_response=True)
            got: list[int] = []
            while True:
                result, error = answers.get(timeout=PATIENCE + 5)
                if error is not None:
                    return self._failed("repeat", begun, error)
                if result.get_response().parameters["triton_final_response"].bool_param:
                    break
                got.append(int(result.as_numpy("OUT")[0]))
        except queue.Empty:
            self._outcomes.hang("repeat", monotonic() - begun)
            return False
        finally:
            client.stop_stream(cancel_requests=True)
        self._outcomes.answer("repeat", monotonic() - begun, "" if got == values.tolist() else f"answered {got}")
        return True

    def _failed(self, model: str, begun: float, error: InferenceServerException) -> bool:
        seconds = monotonic() - begun
        status, message = str(error.status()), str(error.message())
        if "DEADLINE_EXCEEDED" in status:
            self._outcomes.hang(model, seconds)
        elif "failed to connect" in message or "Socket closed" in message or "recvmsg" in message:
            self._outcomes.refuse_connection()
            sleep(0.05)
        else:
            self._outcomes.error(model, seconds, status, message)
            sleep(0.01)
        return False


class _Connections(threading.local):
    """An HTTP connection for each thread."""

    connection: http.client.HTTPConnection | None = None

    def get(self, port: int | None) -> http.client.HTTPConnection:
        if self.connection is None:
            self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        return self.connection


_CONNECTIONS: Final = _Connections()


def _texts(chance: random.Random) -> list[str]:
    return [" ".join(chance.choices(_WORDS, k=chance.randint(1, 40))) for _ in range(20)]


def _is_marked(answer: str, text: str, times: int) -> bool:
    """Whether an echo's answer is the text behind as many marks."""
    return answer.endswith(text) and re.fullmatch(rf"({MARK}\d+ ){{{times}}}", answer[: -len(text)]) is not None


def _text_body(text: str, name: str = "TEXT") -> dict[str, Any]:
    return {"inputs": [{"name": name, "datatype": "BYTES", "shape": [1, 1], "data": [text]}]}


def _first(answer: Any) -> Any:
    return np.array(answer["outputs"][0]["data"], np.float32)
