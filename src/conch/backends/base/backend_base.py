"""Base classes of the built-in backends: convert frames to requests and results to frames.

Runs in workers; called by ``workers/child/worker.py``. Source of ragged batches (``allow_ragged_batch``,
``batch_input``, ``batch_output``): the input collector and the output responder of Triton's backends.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from time import monotonic_ns
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import (
    DTYPES,
    UNFINISHED,
    Array,
    Request,
    Result,
    Strings,
    cut_rows,
    failure,
    joined_rows,
    value_of,
    wire_tensor,
)
from conch.backends.base.openmp import ComputeThreads, Returned
from conch.config.parameters import ParameterTable
from conch.core.errors import ConchError, internal, invalid
from conch.core.tensors import PROTOCOL_NAME
from conch.workers.child.borrowing import BorrowingUnpacker
from conch.workers.child.channel import Channel, Header
from conch.workers.child.messages import log_frame
from conch.workers.child.packing import OutputWatch, Packer, lent_outputs, model_dims

#: Modules that every network in transformers needs; the small module of the network itself is imported at load.
TRANSFORMERS: Final = ("torch", "transformers.modeling_utils", "transformers.models.auto.modeling_auto")


def versioned(name: str, *modules: str) -> str:
    """Return ``name`` with the version of the first imported module of ``modules`` (by default: ``name``)."""
    for module in modules or (name,):
        version = getattr(sys.modules.get(module), "__version__", None)
        if version:
            return f"{name} {version}"
    return name


_Shapes = Sequence[tuple[int, ...]]


def _item_shapes(shapes: _Shapes) -> Array:
    """Return the shape of each row of each request, ``[rows, dimensions]``."""
    rows = [shape[1:] for shape in shapes for _ in range(shape[0])]
    return np.array(rows, np.int64).reshape(len(rows), len(shapes[0]) - 1)


#: The value of each kind of batch input, computed from the shapes of its source input, batch dimension included.
_MAKE: Final[Mapping[str, Callable[[_Shapes], Array]]] = {
    "BATCH_ELEMENT_COUNT": lambda shapes: np.array([*map(prod, shapes)]),
    "BATCH_ACCUMULATED_ELEMENT_COUNT": lambda shapes: np.array([*accumulate(map(prod, shapes))]),
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": lambda shapes: np.array([*accumulate(map(prod, shapes), initial=0)]),
    # Only its shape carries information; in Triton, its memory is uninitialized.
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": lambda shapes: np.zeros(max(map(prod, shapes)), np.int32),
    "BATCH_ITEM_SHAPE": _item_shapes,
    "BATCH_ITEM_SHAPE_FLATTEN": lambda shapes: _item_shapes(shapes).ravel(),
}


class RaggedBatches:
    """Joins and splits batches with ragged inputs, batch inputs and batch outputs, as the configuration declares."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Read a configuration.

        Raises INVALID_ARG if a batch output has variable dimensions beyond those of its source input.
        """
        inputs = {tensor["name"]: tensor for tensor in config.get("input", ())}
        outputs = {tensor["name"]: tensor for tensor in config.get("output", ())}
        self._ragged = frozenset(name for name, tensor in inputs.items() if tensor.get("allow_ragged_batch"))
        self._batch_inputs = [
            (
                target,
                _MAKE[batch_input["kind"]],
                batch_input["source_input"][0],
                DTYPES[PROTOCOL_NAME[batch_input["data_type"]]],
            )
            for batch_input in config.get("batch_input", ())
            for target in batch_input["target_name"]
        ]
        batch = [-1] if int(config["max_batch_size"]) > 0 else []
        self._scattered = {
            target: (batch_output["source_input"][0], (*batch, *model_dims(outputs[target])))
            for batch_output in config.get("batch_output", ())
            for target in batch_output["target_name"]
        }
        for target, (source, shape) in self._scattered.items():
            known = len(batch) + len(model_dims(inputs[source]))
            if -1 in shape[known:]:
                raise invalid(
                    f"output '{target}' of model '{config['name']}' takes its shape from input '{source}', which has "
                    f"{known} dimensions; of the output's {len(shape)}, those beyond must be numbers"
                )

    @property
    def needed(self) -> bool:
        """Whether the configuration has ragged inputs, batch inputs or batch outputs."""
        return bool(self._ragged or self._batch_inputs or self._scattered)

    def join(self, requests: Sequence[Request]) -> dict[str, Array | Strings]:
        """Return the input tensors of one run; the elements of a ragged input are concatenated in one dimension."""
        joined: dict[str, Array | Strings] = {}
        for name in requests[0].inputs:
            tensors = [request.inputs[name] for request in requests]
            joined[name] = _flat(map(value_of, tensors)) if name in self._ragged else joined_rows(tensors)
        for target, make, source, dtype in self._batch_inputs:
            joined[target] = make([request.shape(source) for request in requests]).astype(dtype)
        return joined

    def split(self, requests: Sequence[Request], outputs: Mapping[str, Array | Strings]) -> list[Result]:
        """Split the outputs of one run into one result per request.

        The elements of a batch output are assigned to the requests in order, as many as the shape of each part has.
        Raises INTERNAL if an output has too few elements.
        """
        plain = {name: value for name, value in outputs.items() if name not in self._scattered}
        results = cut_rows(requests, plain)
        for name in outputs.keys() & self._scattered.keys():
            source, dims = self._scattered[name]
            shapes = [_resolved(dims, request.shape(source)) for request in requests]
            for result, part in zip(results, _cut(name, outputs[name], shapes), strict=True):
                result.outputs[name] = part
        return results


def _resolved(dims: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(shape[index] if dim == -1 else dim for index, dim in enumerate(dims))


def _cut(name: str, value: Array | Strings, shapes: _Shapes) -> Iterator[Array | Strings]:
    """Cut the elements of an output into consecutive parts of these shapes."""
    count, expected_count = prod(value.shape), sum(map(prod, shapes))
    if count < expected_count:
        raise internal(f"output '{name}' has {count} elements, but its requests' inputs require {expected_count}")
    at = 0
    for shape in shapes:
        part = slice(at, at := at + prod(shape))
        if isinstance(value, Strings):
            yield Strings(shape, value.elements[part])
        else:
            yield value.ravel()[part].reshape(shape)


def _flat(values: Iterable[Array | Strings]) -> Array | Strings:
    parts = list(values)
    if isinstance(parts[0], Strings):
        elements = [element for part in parts for element in part.elements]  # type: ignore[union-attr]
        return Strings((len(elements),), elements)
    return np.concatenate([part.ravel() for part in parts])  # type: ignore[union-attr]


_logger = logging.getLogger(__name__)


def quiet_libraries() -> None:
    """Keep progress bars and hints for programmers out of the server's log; no effect on variables that are set."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


class BackendBase(ABC):
    """One model in one worker, shared by all threads of the worker.

    ``model`` has the keys ``name``, ``version``, ``directory``, ``version_directory`` and ``filename``; ``config`` is
    the configuration as a JSON object; ``backend_config`` holds the options of ``--backend-config`` for this backend.
    Methods raise ConchError with the message that the server reports.
    """

    def __init__(self, channel: Channel, init: Header) -> None:
        self.channel = channel
        self.model: dict[str, str] = init["model"]
        self.config: dict[str, Any] = json.loads(init["config"])
        self.backend_config: dict[str, str] = init.get("backend_config", {})
        self.threads = 1
        #: Facts about the running model by name (``engine``, ``precision``, ``threads`` …); complete after ``load``.
        self.runtime_facts: dict[str, str] = {}
        #: Dependencies of responses outside of the version directory, as pairs of kind and text
        #: (``conch.repository.fingerprint.Dependency``); complete after ``load``.
        self.dependencies: list[tuple[str, str]] = []
        #: Called before long computation that does not need the interpreter; the worker sets it, so that another thread
        #: receives frames during that time.
        self.before_computing: Callable[[], None] = lambda: None
        self._log: dict[str, Any] = init["log"]
        self._batched = True
        self._counts_rows = True
        self._outputs = OutputWatch(self.model["name"], self._warn_once)
        #: Maximum size of a text in a request (bytes); 0 for no limit.
        self.text_limit = 0

    @abstractmethod
    def complete(self) -> str:
        """Return the configuration as JSON, with missing fields filled in from the model's files."""

    @abstractmethod
    def load(self, instance: Mapping[str, Any]) -> None:
        """Load the model for ``instance["count"]`` instances on ``instance["kind"]``, ``instance["device_id"]``."""

    @abstractmethod
    def execute(self, header: Header, payload: bytearray) -> None:
        """Run the requests of an ``execute`` frame; an exception fails all of them."""

    @abstractmethod
    def cancel(self, serial: int) -> None:
        """Cancel a request; no effect before its execution begins or after it ends."""

    def start(self, instance: dict[str, Any], config: str) -> bool:
        """Load the model with its effective configuration."""
        self.config = json.loads(config)
        self._outputs.declare(self.config)
        self._batched = self._outputs.batches
        policy = self.config.get("model_transaction_policy") or {}
        self._counts_rows = self._batched and not policy.get("decoupled")  # a decoupled model may respond row by row
        try:
            self.load(instance)
        except Exception as error:
            raise failure(error) from error
        return False

    def control(self, header: Header) -> bool:
        """Handle a frame with a cancellation or log settings; return False for any other frame."""
        if header["op"] == "log":
            self._log = header["log"]
        elif header["op"] == "cancel":
            self.cancel(header["serial"])
        else:
            return False
        return True

    @abstractmethod
    def stop(self) -> None:
        """Stop after the requests that are running have completed."""

    def log(self, level: str, message: str) -> None:
        """Send a message to the server's log, if its settings enable ``level`` (``INFO``, ``WARNING``, ``ERROR``)."""
        self._send_log(level, message, once=False)

    def _warn_once(self, message: str) -> None:
        """Send a warning to the server's log, which shows it once for all workers of the model."""
        self._send_log("WARNING", message, once=True)

    def _send_log(self, level: str, message: str, once: bool) -> None:
        if self._log.get(level.lower(), False):
            frame = sys._getframe(2)
            source = {"file": frame.f_code.co_filename.rpartition("/")[2], "line": frame.f_lineno}
            self.channel.send({"op": "log", "level": level, **source, "message": message, "once": once})

    def check_parameters(self, table: ParameterTable) -> None:
        """Log parameters of the model that have no effect. Raises INVALID_ARG for a misspelt parameter."""
        self.log_without_effect("parameters", table.check(self.config.get("parameters") or ()))

    def warn_of(self, warning: str) -> None:
        """Log a warning about the model, unless ``warning`` is empty."""
        if warning:
            self.log("WARNING", f"model '{self.model['name']}': {warning}")

    def log_without_effect(self, kind: str, names: Sequence[str]) -> None:
        """Log a warning with the ``names`` of ineffective settings in the configuration, unless it is empty."""
        self.warn_of(f"{kind} without effect: {', '.join(names)}" if names else "")

    def receive(self, fields: Mapping[str, Any], unpacker: BorrowingUnpacker) -> Request:
        """Convert the description of a request in a frame to a request."""
        return Request(
            {tensor.name: tensor for tensor in unpacker.unpack(fields["inputs"])},
            frozenset(fields["outputs"]),
            serial=fields["serial"],
            id=fields["id"],
            parameters=fields["parameters"],
            batched=self._batched,
            text_limit=self.text_limit,
            loans=lent_outputs(fields.get("loans", {}), self.channel.buffers),
            preview=partial(self._send_text, fields["serial"]) if fields.get("preview") else None,
        )

    def _send_text(self, serial: int, text: str) -> None:
        self.channel.send({"op": "text", "serial": serial, "text": text})

    def pack(self, request: Request, result: Result | ConchError, packer: Packer) -> dict[str, Any]:
        """Return the description of a response for a frame, with only the requested outputs.

        A response that cannot be sent becomes an error of this request only.
        """
        try:
            if isinstance(result, ConchError):
                raise result
            wired = [
                wire_tensor(name, datatype, result.outputs[name])
                for name, datatype in self._outputs.declared.items()
                if name in request.outputs and name in result.outputs
            ]
        except Exception as raised:
            error = failure(raised)
            if error.public != error.message:
                _logger.error("%s", error.message)
            return {
                "outputs": [],
                "parameters": {},
                "error": [error.code.name, error.public, error.param, error.reason],
            }
        self._outputs.check(wired, request.outputs, False, request.rows if self._counts_rows else None)
        outputs = [packer.add(*tensor, request.loans.get(tensor[0])) for tensor in wired]
        return {"outputs": outputs, "parameters": result.parameters}


class BatchBackend(BackendBase):
    """A backend that computes whole batches: each request of an execution gets one response, all at the same time.

    The worker runs ``threads`` loops (``workers/child/worker.py``), one more than it has instances, so that one thread
    can receive, decode and cancel while all instances compute. The server never runs more executions at a time than
    there are instances.
    """

    def __init__(self, channel: Channel, init: Header) -> None:
        super().__init__(channel, init)
        self._under_way: dict[int, Request] = {}
        self._idle = threading.Condition()
        self._running = 0
        #: The threads that compute; None: those that receive frames.
        self.compute_threads: ComputeThreads | None = None

    @abstractmethod
    def run(self, requests: Sequence[Request]) -> tuple[Sequence[Result | ConchError], dict[str, int]]:
        """Return the results of ``requests``, in order, and counts of the work done (``work`` of the ``done`` frame).

        The server runs a request with the result ``UNFINISHED`` again, by its serial number, after other requests.
        Called by at most one thread per instance at a time; an exception fails all requests.
        """

    def compute(self, function: Callable[..., Returned], *arguments: Any) -> Returned:
        """Return the result of ``function``, which runs the model."""
        if self.compute_threads is None:
            return function(*arguments)
        return self.compute_threads.call(function, *arguments)

    def start(self, instance: dict[str, Any], config: str) -> bool:
        waits = super().start(instance, config)
        self.threads = int(instance.get("count", 1)) + 1
        return waits

    def execute(self, header: Header, payload: bytearray) -> None:
        """Run one batch and send its responses."""
        with self._idle:
            self._running += 1
        try:
            self._execute(header, payload)
        finally:
            with self._idle:
                self._running -= 1
                self._idle.notify_all()

    def cancel(self, serial: int) -> None:
        request = self._under_way.get(serial)
        if request is not None:
            request.cancelled = True

    def stop(self) -> None:
        self.before_computing()
        with self._idle:
            self._idle.wait_for(lambda: not self._running)

    def _execute(self, header: Header, payload: bytearray) -> None:
        begin = monotonic_ns()
        unpacker = BorrowingUnpacker(payload, self.channel)
        requests = [self.receive(fields, unpacker) for fields in header["requests"]]
        decoded = monotonic_ns()
        for request in requests:
            self._under_way[request.serial] = request
        try:
            results, work = self.run(requests)
        except BaseException as error:  # includes panics of Rust libraries, and SystemExit from a checkpoint's code
            failed = failure(error)
            results, work = [failed] * len(requests), {}
            if failed is not error:
                self.channel.send(log_frame(error, f"model '{self.model['name']}' failed: {failed.message}"))
        finally:
            for request in requests:
                del self._under_way[request.serial]
        computed = monotonic_ns()
        packer = Packer()
        responses = [
            None if result is UNFINISHED else self.pack(request, result, packer)
            for request, result in zip(requests, results, strict=True)
        ]
        times = (decoded - begin, computed - decoded, monotonic_ns() - computed)
        done = {"op": "done", "batch": header["batch"], "times": times, "responses": responses, "work": work}
        if None in responses:
            done["unfinished"] = [index for index, response in enumerate(responses) if response is None]
        self.channel.send(done, packer)


class TensorBackend(BatchBackend):
    """A backend for models of tensors: joins requests along the batch dimension and splits the outputs."""

    @abstractmethod
    def infer(self, arrays: dict[str, Array | Strings], outputs: frozenset[str]) -> dict[str, Array | Strings]:
        """Run the model once. Called by up to ``instance["count"]`` threads at a time."""

    def start(self, instance: dict[str, Any], config: str) -> bool:
        waits = super().start(instance, config)
        ragged = RaggedBatches(self.config)
        self._ragged = ragged if ragged.needed else None
        return waits

    def run(self, requests: Sequence[Request]) -> tuple[Sequence[Result | ConchError], dict[str, int]]:
        if self._ragged is not None:
            arrays = self._ragged.join(requests)
            self.before_computing()
            return self._ragged.split(requests, self.compute(self.infer, arrays, _requested_outputs(requests))), {}
        if len(requests) == 1:
            request = requests[0]
            arrays = {name: value_of(tensor) for name, tensor in request.inputs.items()}
            self.before_computing()
            return [Result(self.compute(self.infer, arrays, request.outputs))], {}
        joined = {name: joined_rows([request.inputs[name] for request in requests]) for name in requests[0].inputs}
        self.before_computing()
        return cut_rows(requests, self.compute(self.infer, joined, _requested_outputs(requests))), {}


def _requested_outputs(requests: Sequence[Request]) -> frozenset[str]:
    return frozenset[str]().union(*(request.outputs for request in requests))
