"""Assigns the requests of a remote model to its servers.

Pure: the clock is an argument, and the caller reports whether servers are ready. Used on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from math import ceil
from typing import Final

from conch.core.errors import ConchError, unavailable
from conch.core.inference import SEQUENCE_END, SEQUENCE_START, InferRequest, ignore

#: Factor over the average load beyond which an endpoint gets no more requests by their key.
_OVERLOAD: Final = 1.5
#: Below this number of in-flight requests, an endpoint is never overloaded.
_FEW: Final = 4
NOT_ASKED: Final = "it has not been checked yet"
NO_ENDPOINTS: Final = "it has no servers"


@dataclass(slots=True, eq=False)
class RemoteEndpoint:
    """A server of a remote model. ``reason`` is why it gets no requests; empty if it gets requests.

    ``leaving``: it is no longer listed, and is removed when its requests and sequences have ended.
    """

    url: str
    reason: str = NOT_ASKED
    in_flight: int = 0
    sequences: int = 0
    leaving: bool = False
    last_used: int = 0

    @property
    def usable(self) -> bool:
        return not self.reason and not self.leaving


@dataclass(slots=True, eq=False)
class PinnedSequence:
    """A sequence and its server, with the time of its last activity (s) and the number of its in-flight requests.

    It can move to another server while its first request is ``starting``. ``lost`` is the reason if it ended early.
    """

    endpoint: RemoteEndpoint
    seen: float
    in_flight: int = 0
    starting: bool = True
    lost: str = ""


@dataclass(slots=True, eq=False)
class Assignment:
    """The server of a request, and its sequence if it has a known one."""

    endpoint: RemoteEndpoint
    sequence: PinnedSequence | None = None

    @property
    def url(self) -> str:
        return self.endpoint.url


class LostSequences:
    """The reasons of sequences that ended early, kept until their servers have forgotten the sequences too.

    Shared by all remote models: a reason outlives the version on which its sequence started.
    """

    def __init__(self) -> None:
        #: Reasons and their expiry times (s) by model and correlation ID, the oldest first.
        self._reasons: dict[tuple[str, int | str], tuple[str, float]] = {}

    def add(self, key: tuple[str, int | str], reason: str, now: float, idle_seconds: float) -> None:
        """Record the reason for at most ``idle_seconds``, or until the sequence starts again."""
        for old, _ in list(takewhile(lambda item: item[1][1] < now, self._reasons.items())):
            del self._reasons[old]
        self._reasons.pop(key, None)
        self._reasons[key] = reason, now + idle_seconds

    def reason(self, key: tuple[str, int | str], now: float) -> str:
        """The reason why a sequence ended early; empty if it did not."""
        reason, until = self._reasons.get(key, ("", 0.0))
        return reason if now <= until else ""

    def forget(self, key: tuple[str, int | str]) -> None:
        """Remove the reason; called when the sequence starts again or its last request arrives."""
        self._reasons.pop(key, None)


class Endpoints:
    """The servers that share the requests of one model.

    A request goes to the least loaded server, or to the server of its affinity key unless that server is overloaded.
    A sequence stays on the server where it started, until it ends or is idle for ``idle_seconds``. If that server is
    gone, the sequence moves to another server if its first request has not run yet; otherwise it fails. ``lost`` has
    the failed sequences of the model ``key``, including those of its other versions.

    ``check`` raises for invalid addresses. ``on_added`` is called with each new address, so that its health checks
    start; ``on_gone`` is called with each address that is no longer needed.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        idle_seconds: float,
        key: str = "",
        lost: LostSequences | None = None,
        check: Callable[[Sequence[str]], None] = ignore,
        on_added: Callable[[str], None] = ignore,
        on_gone: Callable[[str], None] = ignore,
    ) -> None:
        self._clock = clock
        self._idle_seconds = idle_seconds
        self._check = check
        self._on_added = on_added
        self._on_gone = on_gone
        self._known: dict[str, RemoteEndpoint] = {}
        self._sequences: dict[int | str, PinnedSequence] = {}
        self._key = key
        self._lost = lost if lost is not None else LostSequences()
        self._retired = ""
        self._uses = 0

    @property
    def urls(self) -> list[str]:
        """The listed servers, which get requests if they are ready."""
        return [endpoint.url for endpoint in self._known.values() if not endpoint.leaving]

    @property
    def in_flight(self) -> Mapping[str, int]:
        """Number of in-flight requests of each server, including leaving servers."""
        return {url: endpoint.in_flight for url, endpoint in self._known.items()}

    @property
    def sequences(self) -> int:
        """Number of active sequences."""
        self._forget_idle()
        return len(self._sequences)

    @property
    def reason(self) -> str:
        """The reason why no server can take a request; empty if one can."""
        listed = [endpoint for endpoint in self._known.values() if not endpoint.leaving]
        if any(not endpoint.reason for endpoint in listed):
            return ""
        return "; ".join(f"{endpoint.url}: {endpoint.reason}" for endpoint in listed) or NO_ENDPOINTS

    def update(self, urls: Sequence[str]) -> None:
        """Replace the list of servers by ``urls``.

        New servers get requests when they are ready. Removed servers finish their requests and keep their sequences,
        but get no others. Raises INVALID_ARG for an invalid address; then nothing changes.
        """
        self._check(urls)
        unique_urls = dict.fromkeys(urls)
        for url in unique_urls:
            known = self._known.get(url)
            if known is None:
                self._known[url] = RemoteEndpoint(url)
                self._on_added(url)
            else:
                known.leaving = False
        for endpoint in list(self._known.values()):
            if endpoint.url not in unique_urls:
                endpoint.leaving = True
                self._forget_if_done(endpoint)

    def mark(self, url: str, reason: str, *, gone: bool = False) -> bool:
        """Record that a server is ready (empty ``reason``) or why it is not; returns whether the reason has changed.

        A ``gone`` server has lost its sequences.
        """
        endpoint = self._known.get(url)
        if endpoint is None:
            return False
        news = endpoint.reason != reason
        endpoint.reason = reason
        if gone and endpoint.sequences:
            self._lose_sequences(endpoint)
        return news

    def take(self, request: InferRequest, key: bytes = b"") -> Assignment:
        """Assign a request to a server and count it as in flight there.

        Raises UNAVAILABLE if no server can take it, or if its sequence has ended early.
        """
        self._forget_idle()
        sequence = self._sequence_of(request)
        endpoint = self._chosen(request, key, ()) if sequence is None else sequence.endpoint
        self._use(endpoint)
        if self.begins(request):
            sequence = self._begin_sequence(request.correlation_id, endpoint)
        if sequence is not None:
            sequence.in_flight += 1
        return Assignment(endpoint, sequence)

    def follow(self, request: InferRequest, assignment: Assignment) -> None:
        """Assign a request to its sequence's current server; call it when the previous requests have ended.

        Raises UNAVAILABLE for a sequence that has ended early.
        """
        sequence = assignment.sequence
        if sequence is None:
            return
        if sequence.lost:
            raise self._sequence_ended_error(request, sequence.lost)
        self._reassign(assignment, sequence.endpoint)

    def move(self, request: InferRequest, assignment: Assignment, key: bytes, without: Collection[str]) -> None:
        """Move a request that has not run, and the sequence that it starts, to another server.

        ``without`` has the servers already tried. Raises UNAVAILABLE if there is no other server.
        """
        endpoint, sequence = self._chosen(request, key, without), assignment.sequence
        if sequence is not None:
            if self._sequences.get(request.correlation_id) is sequence:
                sequence.endpoint.sequences -= 1
                endpoint.sequences += 1
            sequence.endpoint = endpoint
        self._reassign(assignment, endpoint)

    def release(self, request: InferRequest, assignment: Assignment) -> None:
        """Release the assignment of a request that has ended."""
        endpoint, sequence = assignment.endpoint, assignment.sequence
        endpoint.in_flight -= 1
        if sequence is not None:
            sequence.in_flight -= 1
            if self.begins(request):
                sequence.starting = False
            if self._sequences.get(request.correlation_id) is sequence:
                self._note_seen(request.correlation_id, sequence)
                if request.flags & SEQUENCE_END:
                    self._end_sequence(request.correlation_id)
                    self._lost.forget((self._key, request.correlation_id))
        self._forget_if_done(endpoint)

    def fail(self, request: InferRequest, assignment: Assignment, reason: str) -> None:
        """End the sequence of a request that may not have run; its later requests fail with ``reason``."""
        sequence = assignment.sequence
        if sequence is None or sequence.lost:
            return
        sequence.lost = reason
        if self._sequences.get(request.correlation_id) is sequence:
            self._end_sequence(request.correlation_id)
            if not request.flags & SEQUENCE_END:
                self._lose(request.correlation_id, reason)

    def retire(self, reason: str) -> None:
        """Mark all sequences as lost for later requests, which go to other versions of the model."""
        self._retired = reason
        for correlation_id in self._sequences:
            self._lose(correlation_id, reason)

    def begins(self, request: InferRequest) -> bool:
        """Whether a request is the first of a sequence."""
        return bool(request.correlation_id) and bool(request.flags & SEQUENCE_START)

    def continues(self, request: InferRequest) -> bool:
        """Whether a request continues an active sequence."""
        return request.correlation_id in self._sequences and not request.flags & SEQUENCE_START

    def _sequence_of(self, request: InferRequest) -> PinnedSequence | None:
        """The sequence that a request continues, if any. Raises UNAVAILABLE if it has ended early."""
        correlation_id = request.correlation_id
        if not correlation_id or request.flags & SEQUENCE_START:
            return None
        sequence = self._sequences.get(correlation_id)
        if sequence is not None:
            self._note_seen(correlation_id, sequence)
            return sequence
        reason = self._lost.reason((self._key, correlation_id), self._clock())
        if reason:
            raise self._sequence_ended_error(request, reason)
        return None

    def _sequence_ended_error(self, request: InferRequest, reason: str) -> ConchError:
        if request.flags & SEQUENCE_END:
            self._lost.forget((self._key, request.correlation_id))
        sequence = f"sequence {request.correlation_id} of model '{request.model_name}'"
        return unavailable(f"{sequence} has ended early, because {reason}: start it again")

    def _use(self, endpoint: RemoteEndpoint) -> None:
        self._uses += 1
        endpoint.last_used = self._uses
        endpoint.in_flight += 1

    def _reassign(self, assignment: Assignment, endpoint: RemoteEndpoint) -> None:
        before = assignment.endpoint
        if before is not endpoint:
            self._use(endpoint)
            assignment.endpoint = endpoint
            before.in_flight -= 1
            self._forget_if_done(before)

    def _chosen(self, request: InferRequest, key: bytes, without: Collection[str]) -> RemoteEndpoint:
        usable = [endpoint for endpoint in self._known.values() if endpoint.usable and endpoint.url not in without]
        if not usable:
            raise self.refusal(request)
        if len(usable) == 1:
            return usable[0]
        if key:
            preferred = max(usable, key=lambda endpoint: blake2b(key, key=_salt(endpoint.url), digest_size=8).digest())
            limit = max(_FEW, ceil(_OVERLOAD * (sum(endpoint.in_flight for endpoint in usable) + 1) / len(usable)))
            if request.correlation_id or preferred.in_flight < limit:  # it may have started at another ingress
                return preferred
        return min(usable, key=lambda endpoint: (endpoint.in_flight, endpoint.last_used))

    def refusal(self, request: InferRequest) -> ConchError:
        """The error for a request that no server can take."""
        return unavailable(f"model '{request.model_name}' is not available: {self.reason or 'all servers were tried'}")

    def _begin_sequence(self, correlation_id: int | str, endpoint: RemoteEndpoint) -> PinnedSequence:
        if correlation_id in self._sequences:
            self._end_sequence(correlation_id)
        self._lost.forget((self._key, correlation_id))
        sequence = self._sequences[correlation_id] = PinnedSequence(endpoint, self._clock())
        endpoint.sequences += 1
        if self._retired:
            self._lose(correlation_id, self._retired)
        return sequence

    def _end_sequence(self, correlation_id: int | str) -> None:
        endpoint = self._sequences.pop(correlation_id).endpoint
        endpoint.sequences -= 1
        self._forget_if_done(endpoint)

    def _lose_sequences(self, endpoint: RemoteEndpoint) -> None:
        """End the sequences that have started on a lost server; the others can still start elsewhere."""
        for correlation_id, sequence in list(self._sequences.items()):
            if sequence.endpoint is endpoint and not sequence.starting:
                sequence.lost = f"its server {endpoint.url} became unavailable"
                self._lose(correlation_id, sequence.lost)
                self._end_sequence(correlation_id)

    def _lose(self, correlation_id: int | str, reason: str) -> None:
        self._lost.add((self._key, correlation_id), reason, self._clock(), self._idle_seconds)

    def _note_seen(self, correlation_id: int | str, sequence: PinnedSequence) -> None:
        """Record activity of a sequence; sequences are ordered by their last activity."""
        sequence.seen = self._clock()
        del self._sequences[correlation_id]
        self._sequences[correlation_id] = sequence

    def _forget_idle(self) -> None:
        """Remove idle sequences, which their servers have forgotten too."""
        since = self._clock() - self._idle_seconds
        for correlation_id, sequence in list(takewhile(lambda item: item[1].seen < since, self._sequences.items())):
            if sequence.in_flight:
                self._note_seen(correlation_id, sequence)
            else:
                self._end_sequence(correlation_id)

    def _forget_if_done(self, endpoint: RemoteEndpoint) -> None:
        done = endpoint.leaving and not endpoint.in_flight and not endpoint.sequences
        if done and self._known.get(endpoint.url) is endpoint:
            del self._known[endpoint.url]
            self._on_gone(endpoint.url)


def _salt(url: str) -> bytes:
    """A blake2b key for an address of any length; blake2b keys have at most 64 bytes."""
    return blake2b(url.encode(), digest_size=32).digest()
