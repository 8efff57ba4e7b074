"""Delivers responses in the order in which their requests arrived (``preserve_ordering``)."""

from __future__ import annotations

from collections import OrderedDict, deque

from conch.core.inference import InferRequest, InferResponse, OnResponse


class InOrder:
    """Holds the responses of a request until all earlier requests have ended."""

    def __init__(self) -> None:
        self._held: OrderedDict[InferRequest, deque[tuple[InferResponse, OnResponse]]] = OrderedDict()

    def admit(self, request: InferRequest) -> None:
        """Append a request; call this in order of arrival."""
        self._held[request] = deque()
        request.order = self

    def deliver(self, request: InferRequest, response: InferResponse, on_response: OnResponse) -> None:
        """Hold a response until all earlier requests are complete; deliver all that are no longer blocked."""
        self._held[request].append((response, on_response))
        while self._held:
            first, responses = next(iter(self._held.items()))
            if not responses:
                return
            response, on_response = responses.popleft()
            if response.final:
                del self._held[first]
            first.deliver(response, on_response)
