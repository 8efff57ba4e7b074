"""A request as it is sent: what senders get of all that makes requests.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

#: Numbers of texts have as many digits as this.
_FIRST_NUMBER: Final = 100_000


@dataclass(frozen=True, slots=True)
class Payload:
    """A request as it is sent, prepared once: a whole HTTP request, or a gRPC message with its prefix.

    ``inferences`` is how many inferences it counts for, its batch size.  Where it belongs to a sequence, the fields
    that say so begin at ``fields_at`` (bytes, -1: it belongs to none).  Where senders change the number with which its
    text begins, so that no two requests are alike, that number is at ``number_at`` (bytes, -1: there is none).
    """

    data: bytes
    inferences: int = 1
    fields_at: int = -1
    number_at: int = -1

    def with_fields(self, fields: bytes) -> Payload:
        """The same request with other fields of a sequence, which are as many bytes."""
        at = self.fields_at
        return Payload(self.data[:at] + fields + self.data[at + len(fields) :], self.inferences, at)

    def numbered(self, number: int) -> Payload:
        """The same request with another number in its text."""
        at = self.number_at
        digits = b"%d" % (_FIRST_NUMBER + number % (9 * _FIRST_NUMBER))
        return Payload(self.data[:at] + digits + self.data[at + len(digits) :], self.inferences, number_at=at)


Payloads = Sequence[Payload]
