"""A request as it is sent: what senders get of all that makes requests.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Payload:
    """A request as it is sent, prepared once: a whole HTTP request, or a gRPC message with its prefix.

    ``inferences`` is how many inferences it counts for, its batch size.  Where it belongs to a sequence, the fields
    that say so begin at ``fields_at`` (bytes, -1: it belongs to none).
    """

    data: bytes
    inferences: int = 1
    fields_at: int = -1

    def with_fields(self, fields: bytes) -> Payload:
        """The same request with other fields of a sequence, which are as many bytes."""
        at = self.fields_at
        return Payload(self.data[:at] + fields + self.data[at + len(fields) :], self.inferences, at)


Payloads = Sequence[Payload]
