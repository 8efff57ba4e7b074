"""The Python backend: runs a user's ``TritonPythonModel`` in its own worker.

The worker's main thread makes all calls to the backend. Coroutines of the model run on one thread with an event loop,
which has OpenMP threads of its own (``workers/child/worker.py``); a decoupled model may send responses from any thread.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import threading
from concurrent.futures import CancelledError, Future, TimeoutError
from time import monotonic_ns
from typing import Any, Callable

from conch.backends.python import pb_utils, runtime
from conch.backends.python.errors import PLACES, describe
from conch.backends.python.pb_utils import ModelConfig
from conch.backends.python.request import InferenceRequest
from conch.backends.python.response import InferenceResponse
from conch.backends.python.runtime import ResponseChannel, Runtime
from conch.backends.python.tensor import ArrayUnpacker
from conch.core.errors import Code, ConchError, internal, unsupported
from conch.workers.child.channel import Channel, Header
from conch.workers.child.messages import log_frame
from conch.workers.child.packing import Packer, lent_outputs


def prepare(model: dict[str, Any]) -> None:
    """Make the model's files and ``triton_python_backend_utils`` importable.

    ``model`` is the ``model`` field of the ``init`` frame; its ``backend_directory`` is the folder of a Python-based
    backend. Called once per worker; each instance has its own worker, so that a model cannot affect the interpreter of
    another.
    """
    backend = model.get("backend_directory")
    for directory in (backend,) if backend else (model["version_directory"], model["directory"]):
        if directory not in sys.path:
            sys.path.append(directory)
    sys.modules["triton_python_backend_utils"] = pb_utils
    sys.modules["c_python_backend_utils"] = pb_utils


def path(model: dict[str, Any]) -> str:
    backend = model.get("backend_directory")
    return f"{backend}/model.py" if backend else f"{model['version_directory']}/{model['filename'] or 'model.py'}"


def module_name(model: dict[str, Any]) -> str:
    """Return the name of the model's module: ``<version>.<file name>``, or ``model`` for a Python-based backend."""
    if model.get("backend_directory"):
        return "model"
    return f"{os.path.basename(model['version_directory'])}.{os.path.splitext(os.path.basename(path(model)))[0]}"


#: Interval between calls of ``is_ready``, and timeout of a call (s).
PERIOD_SECONDS = 1.0
LIMIT_SECONDS = 5.0


class Readiness:
    """Calls ``is_ready`` periodically and reports changes to the server; the model is not ready until the first result.

    The constructor waits for the first call to return or time out. Calls run in separate threads, concurrently with
    ``execute``; coroutines run on ``loop`` if there is one.
    """

    def __init__(
        self, runtime: Runtime, is_ready: Callable[[], Any], loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._runtime = runtime
        self._is_ready = is_ready
        self._loop = loop
        self._reported: bool | None = None
        self._logged_failure = ""
        self._closed = threading.Event()
        self._first_call_ended = threading.Event()
        self._report(False)
        threading.Thread(target=self._watch, name="conch-readiness", daemon=True).start()
        self._first_call_ended.wait()

    def close(self) -> None:
        """Stop calling ``is_ready``."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.is_set():
            future: Future[bool] = Future()
            threading.Thread(target=self._call_is_ready, args=(future,), name="conch-is-ready", daemon=True).start()
            try:
                self._report(future.result(LIMIT_SECONDS))
                self._logged_failure = ""
            except TimeoutError:
                self._report_failure(internal(f"is_ready() has not returned within {LIMIT_SECONDS:g} s"))
                self._first_call_ended.set()
                future.exception()  # blocks, so that calls do not overlap
            except ConchError as error:
                self._report_failure(error)
            self._first_call_ended.set()
            self._closed.wait(PERIOD_SECONDS)

    def _call_is_ready(self, future: Future[bool]) -> None:
        try:
            ready = self._is_ready()
            if inspect.isawaitable(ready):
                ready = self._await_result(ready)
            if not isinstance(ready, bool):
                raise internal("is_ready() must return a boolean value")
            future.set_result(ready)
        except ConchError as error:
            future.set_exception(error)
        except BaseException as error:
            failure = internal(describe(error))
            failure.__cause__ = error
            future.set_exception(failure)

    def _await_result(self, ready: Any) -> Any:
        async def wait() -> Any:
            return await ready

        if self._loop is None:
            return asyncio.run(wait())
        return asyncio.run_coroutine_threadsafe(wait(), self._loop).result()

    def _report(self, ready: bool) -> None:
        if ready is not self._reported and not self._closed.is_set():
            self._reported = ready
            self._runtime.channel.send({"op": "model_ready", "ready": ready})

    def _report_failure(self, error: ConchError) -> None:
        """Report the model as not ready, and log the reason unless it was logged last."""
        self._report(False)
        heading = f"model '{self._runtime.instance}' is not ready: {error.message.partition(PLACES)[0]}"
        if heading == self._logged_failure or self._closed.is_set():
            return
        self._logged_failure = heading
        if error.__cause__ is None:
            self._runtime.write_log("ERROR", os.path.basename(__file__), 0, heading)
        else:
            frame = log_frame(error.__cause__, heading)
            self._runtime.write_log("ERROR", frame["file"], frame["line"], frame["message"])


class PythonBackend:
    """One instance of a Python model. Methods raise ConchError with the message that the server reports."""

    #: The worker's main thread makes all calls.
    threads = 1

    def __init__(self, channel: Channel, init: Header) -> None:
        self._channel = channel
        self._model: dict[str, Any] = init["model"]
        self._config: dict[str, Any] = json.loads(init["config"])
        self._runtime = Runtime(channel, self._model, init["log"])
        self._class: Any | None = None
        #: The ``TritonPythonModel`` object, from ``start`` to ``stop``.
        self.instance: Any | None = None
        self._instance_name = ""
        self._execute: Callable[[list[InferenceRequest]], Any] | None = None
        self._decoupled = False
        self._reschedules = False  # whether the model has ever rescheduled a request
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None
        self._readiness: Readiness | None = None
        #: Called for every failure of the model while it serves; ``__cause__`` is the model's exception, if any.
        self.on_failure: Callable[[ConchError], None] = self._log_failure
        runtime.install(self._runtime)
        prepare(self._model)

    def control(self, header: Header) -> bool:
        """Handle a cancellation or new log settings; return False for any other frame."""
        return self._runtime.control(header)

    def complete(self) -> str:
        """Return the configuration completed by the model's ``auto_complete_config``, as JSON."""
        function = getattr(self._load(), "auto_complete_config", None)
        if function is None:
            return json.dumps(self._config)
        try:
            completed = function(ModelConfig(json.dumps(self._config)))
        except BaseException as error:
            raise internal(describe(error)) from error
        if not isinstance(completed, ModelConfig):
            raise internal(
                f"auto_complete_config function in model '{self._model['name']}' must return a valid "
                "pb.ModelConfig object."
            )
        return json.dumps(completed.as_dict())

    def start(self, instance: dict[str, Any], config: str) -> bool:
        """Create and initialize the ``TritonPythonModel``. Returns whether ``execute`` is a coroutine function."""
        self._config = json.loads(config)
        _check_force_cpu(self._config)
        policy: dict[str, Any] = self._config.get("model_transaction_policy", {})
        self._decoupled = bool(policy.get("decoupled", False))
        self._runtime.outputs.declare(self._config)
        self._instance_name = self._runtime.instance = instance["name"]
        model_class = self._load()
        try:
            model = model_class()
            if hasattr(model, "initialize"):
                model.initialize(self._arguments(instance, config))
        except BaseException as error:
            raise internal(describe(error)) from error
        self.instance = model
        self._runtime.phase = "serving"
        self._execute = getattr(model, "execute", None)
        asynchronous = inspect.iscoroutinefunction(self._execute)
        if asynchronous:
            self._loop = asyncio.new_event_loop()
            self._loop_thread = threading.Thread(target=self._loop.run_forever, name="conch-event-loop", daemon=True)
            self._loop_thread.start()
        if hasattr(model, "is_ready"):
            self._readiness = Readiness(self._runtime, model.is_ready, self._loop)
        return asynchronous

    def execute(self, header: Header, payload: bytearray) -> None:
        """Run the batch of an ``execute`` frame and send its ``done`` frame."""
        begin = monotonic_ns()
        unpacker = ArrayUnpacker(payload, self._channel)
        decoupled = self._decoupled
        batches = self._runtime.outputs.batches and not decoupled  # a decoupled model may respond row by row
        rows: int | None = None
        replies: list[ResponseChannel] = []
        requests: list[InferenceRequest] = []
        try:
            for fields in header["requests"]:
                if batches:
                    rows = fields["inputs"][0][2][0] if fields["inputs"] else None
                reply = self._runtime.reply_of_rescheduled(fields["serial"]) if self._reschedules else None
                if reply is None:
                    reply = ResponseChannel(self._runtime, fields["serial"], set(fields["outputs"]), decoupled, rows)
                if "loans" in fields:
                    reply.loans = lent_outputs(fields["loans"], self._channel.buffers)
                replies.append(reply)
                requests.append(InferenceRequest.received(fields, unpacker.tensors(fields["inputs"]), reply))
        except ConchError as error:
            self._fail(header, replies, error)
            return
        for reply in replies:
            reply.open()
        decoded = monotonic_ns()
        packer = Packer()
        try:
            returned = self._run(requests, replies)
            del requests, unpacker
            executed = monotonic_ns()
            rescheduled = self._rescheduled(returned, replies) if self._runtime.rescheduled else ()
            responses = self._responses(returned, replies, packer)
        except ConchError as error:
            self._fail(header, replies, error)
            return
        times = (decoded - begin, executed - decoded, monotonic_ns() - executed)
        done = {"op": "done", "batch": header["batch"], "times": times, "responses": responses}
        if rescheduled:
            done["rescheduled"] = rescheduled
        self._channel.send(done, packer)

    def stop(self) -> None:
        """Call the model's ``finalize``."""
        self._runtime.phase = "stopping"
        if self._readiness is not None:
            self._readiness.close()
        finalize = getattr(self.instance, "finalize", None)
        if finalize is not None:
            try:
                finalize()
            except BaseException as error:
                self.on_failure(_caused(internal(describe(error)), error))
        self.instance = None

    def close(self) -> None:
        """End the backend's threads after ``stop``, if the process continues; in workers they end with the process."""
        self._runtime.close()
        if self._loop is not None and self._loop_thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop_thread.join()
            self._loop.close()
            self._loop = None

    def _load(self) -> Any:
        if self._class is None:
            if not os.path.exists(path(self._model)):
                raise internal(f"Python model file not found in '{path(self._model)}'")
            name = module_name(self._model)
            try:
                self._class = __import__(name, fromlist=["TritonPythonModel"]).TritonPythonModel
            except BaseException as error:
                raise internal(describe(error)) from error
        return self._class

    def _arguments(self, instance: dict[str, Any], config: str) -> dict[str, str]:
        return {
            "model_config": config,
            "model_instance_kind": instance["kind"],
            "model_instance_name": instance["name"],
            "model_instance_device_id": str(instance["device_id"]),
            "model_repository": self._model["directory"],
            "model_version": str(self._model["version"]),
            "model_name": self._model["name"],
        }

    def _run(self, requests: list[InferenceRequest], replies: list[ResponseChannel]) -> Any:
        if self._execute is None:
            raise self._failed(f"Python model {path(self._model)} does not implement `execute` method.")
        try:
            if self._loop is None:
                return self._execute(requests)
            running = asyncio.run_coroutine_threadsafe(self._execute(requests), self._loop)
            if not self._decoupled:
                return running.result()
        except BaseException as error:
            raise self._failed(describe(error)) from error
        running.add_done_callback(lambda done: self._finished(done, replies))
        return None

    def _finished(self, done: Future[Any], replies: list[ResponseChannel]) -> None:
        """Fail the open requests of a decoupled model's coroutine if the coroutine ended with an error."""
        error = CancelledError("the coroutine was cancelled") if done.cancelled() else done.exception()
        if error is not None:
            failure = _caused(self._failed(describe(error)), error)
            self.on_failure(failure)
            for reply in replies:
                reply.fail(Code.INTERNAL.name, failure.message)

    def _rescheduled(self, returned: Any, replies: list[ResponseChannel]) -> list[int]:
        """Return the indices of the requests that the model has rescheduled; they do not end with this batch."""
        rescheduled = self._runtime.rescheduled
        indices = [index for index, reply in enumerate(replies) if reply.serial in rescheduled and not reply.closed]
        rescheduled.clear()
        if isinstance(returned, list) and len(returned) == len(replies):
            for index in indices:
                if returned[index] is not None:
                    raise self._failed(
                        "Expected a None object in the execute function return list for reschduled request, found type "
                        f"'{type(returned[index])}'."
                    )
        for index in indices:
            replies[index].waiting = True
        self._reschedules = True
        return indices

    def _responses(self, returned: Any, replies: list[ResponseChannel], packer: Packer) -> list[dict[str, Any] | None]:
        """Convert the result of ``execute`` to entries of a ``done`` frame. Raises INTERNAL for an invalid result."""
        if self._decoupled and returned is not None:
            raise self._failed(
                f"Python model '{self._instance_name}' is using the decoupled mode and the execute function must "
                "return None."
            )
        if returned is None:
            return [None] * len(replies)
        if not isinstance(returned, list):
            raise self._failed(f"Expected a list in the execute return, found type '{type(returned)}'.")
        if len(returned) != len(replies):
            raise self._failed(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(replies)}, and InferenceResponse(s) size is:{len(returned)}\n"
            )
        for response in returned:
            if response is not None and not isinstance(response, InferenceResponse):
                raise self._failed(
                    "Expected an 'InferenceResponse' object in the execute function return list, found type "
                    f"'{type(response)}'."
                )
        return [self._entry(response, reply, packer) for response, reply in zip(returned, replies)]

    def _entry(
        self, response: InferenceResponse | None, reply: ResponseChannel, packer: Packer
    ) -> dict[str, Any] | None:
        if response is None:
            return None
        if reply.sent:
            message = "Unable to send response. Non-decoupled model cannot send more than one response."
            self.on_failure(self._failed(message))
            reply.fail(Code.INTERNAL.name, message)
            return None
        reply.close()
        return reply.encode(response, packer)

    def _fail(self, header: Header, replies: list[ResponseChannel], error: ConchError) -> None:
        for reply in replies:
            reply.close()
        self.on_failure(error)
        done = {"op": "done", "batch": header["batch"], "times": (0, 0, 0), "error": [error.code.name, error.message]}
        self._channel.send(done)

    def _failed(self, message: str) -> ConchError:
        return internal(f"Failed to process the request(s) for model '{self._instance_name}', message: {message}")

    def _log_failure(self, failure: ConchError) -> None:
        if failure.__cause__ is None:
            line = sys._getframe(1).f_lineno
            self._runtime.write_log("ERROR", os.path.basename(__file__), line, failure.message)
        else:
            frame = log_frame(failure.__cause__, failure.message.partition(PLACES)[0])
            self._runtime.write_log("ERROR", frame["file"], frame["line"], frame["message"])


def _caused(failure: ConchError, cause: BaseException) -> ConchError:
    failure.__cause__ = cause
    return failure


def _check_force_cpu(config: dict[str, Any]) -> None:
    value = config.get("parameters", {}).get("FORCE_CPU_ONLY_INPUT_TENSORS", {}).get("string_value", "yes")
    if value not in ("yes", "no"):
        raise unsupported(f"Incorrect value for FORCE_CPU_ONLY_INPUT_TENSORS: {value}'")
