"""Calls of a model to the server: requests to other models (BLS), and loading and unloading of models.

Runs in the worker of a Python model, in any of its threads. Of the threads that wait for responses, one receives frames
for all (``Channel.wait``). Coroutines must not block; while coroutines wait, a helper thread receives frames for them.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from itertools import count
from typing import Any, Callable
from weakref import WeakValueDictionary

from conch.backends.python.errors import ErrorCode, TritonError
from conch.backends.python.response import InferenceResponse
from conch.backends.python.tensor import ArrayUnpacker
from conch.workers.child.channel import Channel, Header
from conch.workers.child.packing import Packer

#: A response, and whether it is the last one.
ResponseAndFinal = tuple[InferenceResponse, bool]


class BlsClient:
    """The calls in flight of one worker."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._numbers = count(1)
        self._calls: WeakValueDictionary[int, BlsCall] = WeakValueDictionary()
        #: The futures of coroutines that wait for a response.
        self._awaited: set[asyncio.Future[Any]] = set()
        self._awaiting = threading.Event()
        self._helper: threading.Thread | None = None
        self._starting_helper = threading.Lock()

    def start(self, header: Header, packer: Packer | None = None) -> BlsCall:
        """Send a call; adds its number to ``header``."""
        call = BlsCall(self, next(self._numbers))
        self._calls[call.number] = call
        header["call"] = call.number
        self._channel.send(header, packer)
        return call

    def answer(self, header: Header, payload: bytearray) -> None:
        """Pass a response to its call; runs in the thread that received the frame."""
        # Unpacked even if the call has ended, so that the memory is released.
        tensors = ArrayUnpacker(payload, self._channel).tensors(header["outputs"])
        call = self._calls.get(header["call"])
        if call is None:
            return
        error = header.get("error")
        response = InferenceResponse(tensors, None if error is None else TritonError(error[1], ErrorCode[error[0]]))
        response._parameters = header["parameters"]
        call.add(response, header["final"])

    def wait(self, call: BlsCall) -> None:
        """Block until ``call`` has a response."""
        self._channel.wait(call.has_answer)

    def cancel(self, call: BlsCall, drop: bool) -> None:
        """Cancel a call; with ``drop``, discard its responses too. May be called by the garbage collector."""
        self._channel.post({"op": "cancel_call", "call": call.number, "drop": drop})

    def expect(self, future: asyncio.Future[Any]) -> None:
        """Keep a thread receiving frames until ``future`` has its response."""
        self._awaited.add(future)
        if self._helper is None:
            with self._starting_helper:
                if self._helper is None:
                    self._helper = threading.Thread(target=self._receive, name="conch-calls", daemon=True)
                    self._helper.start()
        self._awaiting.set()

    def expect_no_more(self, future: asyncio.Future[Any]) -> None:
        self._awaited.discard(future)

    def _receive(self) -> None:
        while True:
            self._awaiting.wait()
            self._awaiting.clear()
            self._channel.wait(lambda: not self._awaited)


class BlsCall:
    """One call: the received responses, and the coroutines that wait for the next ones.

    Only code that waits for responses holds a reference; if the last reference is dropped early, the call is cancelled.
    """

    __slots__ = ("__weakref__", "_calls", "_ended", "_lock", "_responses", "_waiters", "number")

    def __init__(self, calls: BlsClient, number: int) -> None:
        self.number = number
        self._calls = calls
        self._responses: deque[ResponseAndFinal] = deque()
        self._ended = False
        self._lock = threading.Lock()
        self._waiters: deque[tuple[asyncio.Future[Any], Callable[[ResponseAndFinal], Any]]] = deque()

    def __del__(self) -> None:
        if not self._ended:
            self._calls.cancel(self, drop=True)

    def cancel(self) -> None:
        """Cancel the call on the server, unless it has ended."""
        if not self._ended:
            self._calls.cancel(self, drop=False)

    def has_answer(self) -> bool:
        return bool(self._responses)

    def next(self) -> ResponseAndFinal:
        """Block until the next response, and return it."""
        while True:
            self._calls.wait(self)
            try:
                return self._responses.popleft()
            except IndexError:  # another thread has taken it
                pass

    def next_later(self, convert: Callable[[ResponseAndFinal], Any]) -> asyncio.Future[Any]:
        """Return a future of the running event loop for ``convert`` of the next response."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        with self._lock:
            arrived = self._responses.popleft() if self._responses else None
            if arrived is None:
                self._waiters.append((future, convert))
        if arrived is not None:
            future.set_result(convert(arrived))
        else:
            future.add_done_callback(self._forget)
            self._calls.expect(future)
        return future

    def add(self, response: InferenceResponse, final: bool) -> None:
        """Keep a response for the next waiting coroutine, or for the next caller."""
        with self._lock:
            self._ended = self._ended or final
            before = len(self._responses)
            self._responses.append((response, final))
            future = self._waiters[before][0] if before < len(self._waiters) else None
        if future is None:
            return
        self._calls.expect_no_more(future)
        try:
            future.get_loop().call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the event loop is closed
            pass

    def _deliver(self) -> None:
        """Give the responses that nobody has taken to the waiting coroutines, in order; runs in their event loop."""
        while True:
            with self._lock:
                while self._waiters and self._waiters[0][0].done():  # it was cancelled
                    self._waiters.popleft()
                if not self._waiters or not self._responses:
                    break
                future, convert = self._waiters.popleft()
                response = self._responses.popleft()
            future.set_result(convert(response))
        for future, _ in list(self._waiters):  # another caller may have taken a response that one of them expected
            self._calls.expect(future)

    def _forget(self, future: asyncio.Future[Any]) -> None:
        """Stop waiting for a future that is done or cancelled."""
        with self._lock:
            self._waiters = deque(waiter for waiter in self._waiters if waiter[0] is not future)
        self._calls.expect_no_more(future)


class ResponseIterator:
    """Iterates over the responses of a decoupled call as they arrive; after its end, over all of them again.

    ``for`` blocks its thread, ``async for`` does not.
    """

    __slots__ = ("__weakref__", "_call", "_done", "_first", "_next", "_responses")

    def __init__(self, call: BlsCall, first: ResponseAndFinal | None = None) -> None:
        self._call = call
        self._first = first
        self._responses: deque[InferenceResponse] = deque()
        self._done = False
        self._next = 0

    def __iter__(self) -> ResponseIterator:
        if self._done and self._next >= len(self._responses):
            self._next = 0
        return self

    def __next__(self) -> InferenceResponse:
        if self._done:
            return self._repeat(StopIteration)
        return self._note(self._take_first() or self._call.next())

    def __aiter__(self) -> ResponseIterator:
        return self.__iter__()

    async def __anext__(self) -> InferenceResponse:
        if self._done:
            return self._repeat(StopAsyncIteration)
        return self._note(self._take_first() or await self._call.next_later(_as_it_is))

    def cancel(self) -> None:
        """Cancel the request; responses that still arrive can be iterated over."""
        self._call.cancel()

    def _take_first(self) -> ResponseAndFinal | None:
        first, self._first = self._first, None
        return first

    def _note(self, item: ResponseAndFinal) -> InferenceResponse:
        response, self._done = item
        self._responses.append(response)
        self._next = len(self._responses)
        return response

    def _repeat(self, end: Any) -> InferenceResponse:
        if self._next >= len(self._responses):
            raise end
        self._next += 1
        return self._responses[self._next - 1]


def _as_it_is(response: ResponseAndFinal) -> ResponseAndFinal:
    return response
