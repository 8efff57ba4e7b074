"""Releases responses in the order in which their requests arrived (``preserve_ordering``)."""

from __future__ import annotations

import logging
from collections import deque

from conch.inference import InferRequest, InferResponse

LOG = logging.getLogger("conch")


class InOrder:
    """Holds the responses of a request until all earlier requests have ended."""

    def __init__(self) -> None:
        self._held: deque[_Held] = deque()

    def admit(self, request: InferRequest) -> None:
        """Append a request; call this in order of arrival."""
        held = _Held(request)
        self._held.append(held)
        request.on_response = lambda response: self._arrived(held, response)

    def _arrived(self, held: _Held, response: InferResponse) -> None:
        held.responses.append(response)
        while self._held:
            first = self._held[0]
            while first.responses:
                response = first.responses.popleft()
                if response.final:
                    self._held.popleft()
                try:
                    first.deliver(response)
                except Exception:
                    # One failed receiver must not block the responses of other requests.
                    LOG.exception("a response could not be passed on in its order")
                response.forget_frames()
                if response.final:
                    break
            else:
                return


class _Held:
    __slots__ = ("deliver", "responses")

    def __init__(self, request: InferRequest) -> None:
        self.deliver = request.on_response
        self.responses: deque[InferResponse] = deque()
