"""How the soak's clients ask over each protocol, and tell what became of each request."""

from __future__ import annotations

import http.client
import json
import queue
import threading
import urllib.parse
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any, Final

import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from benchmarks.soak.outcomes import Outcomes

#: A request without an answer for this long (s) hangs.
PATIENCE: Final = 60.0
#: Says what is wrong with an answer, nothing when it is right.
Check = Callable[[Any], str]


class HttpAsker:
    """Asks the server at ``address``, each thread over a connection of its own."""

    def __init__(self, address: str, outcomes: Outcomes) -> None:
        self._port = urllib.parse.urlsplit(f"//{address}").port
        self._outcomes = outcomes

    def ask(self, model: str, path: str, body: Any, check: Check) -> bool:
        """Send a request and count what became of it, as one of ``model``; whether it was answered."""
        start = monotonic()
        try:
            status, response = self.post(path, body)
        except TimeoutError:
            self._outcomes.hang(model, monotonic() - start)
            return False
        except (OSError, http.client.HTTPException):
            # Out of descriptors: the server closed the connection, or did not accept it.
            self._outcomes.refuse_connection()
            sleep(0.05)
            return False
        seconds = monotonic() - start
        if status == 200:
            self._outcomes.answer(model, seconds, check(response))
            return True
        self._outcomes.error(model, seconds, str(status), str(response.get("error", response)))
        sleep(0.01)
        return False

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """The status and the JSON of the answer; an empty one is None."""
        connection = _CONNECTIONS.get(self._port)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            text = reply.read()
            return reply.status, json.loads(text) if text else None
        except BaseException:
            connection.close()
            raise


class GrpcAsker:
    """Asks through tritonclient's ``client``; methods return whether it may be used further."""

    def __init__(self, client: grpcclient.InferenceServerClient, outcomes: Outcomes) -> None:
        self._client = client
        self._outcomes = outcomes

    def infer(self, model: str, tensor: grpcclient.InferInput, check: Check) -> bool:
        start = monotonic()
        try:
            result = self._client.infer(model, [tensor], client_timeout=PATIENCE)
        except InferenceServerException as error:
            return self._failed(model, start, error)
        self._outcomes.answer(model, monotonic() - start, check(result))
        return True

    def stream(self, model: str, tensor: grpcclient.InferInput, check: Check) -> bool:
        """Ask a decoupled model; ``check`` gets the list of its responses that are not empty."""
        responses: queue.Queue[Any] = queue.Queue()
        start = monotonic()
        self._client.start_stream(lambda result, error: responses.put((result, error)), stream_timeout=PATIENCE)
        try:
            self._client.async_stream_infer(model, [tensor], enable_empty_final_response=True)
            got: list[Any] = []
            while True:
                result, error = responses.get(timeout=PATIENCE + 5)
                if error is not None:
                    return self._failed(model, start, error)
                response = result.get_response()
                if response.outputs:
                    got.append(result)
                if response.parameters["triton_final_response"].bool_param:
                    break
        except queue.Empty:
            self._outcomes.hang(model, monotonic() - start)
            return False
        finally:
            self._client.stop_stream(cancel_requests=True)
        self._outcomes.answer(model, monotonic() - start, check(got))
        return True

    def _failed(self, model: str, start: float, error: InferenceServerException) -> bool:
        seconds = monotonic() - start
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
