"""What a server that is measured does, whoever started it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from conch.errors import ConchError
from conch.perf.senders.channels.connecting import Address

#: Changes to a model's configuration, by the model's name, as in ``Candidate.overrides``.
Overrides = Mapping[str, Mapping[str, Any]]
#: Configurations in force, by the model's name, as ``GET /v2/models/M/config`` shows them.
Configs = Mapping[str, Mapping[str, Any]]


class ServerGone(ConchError):
    """The server has ended, or answers no more; INTERNAL as what it did before cannot be known."""


class ServerLost(ConchError):
    """The server has ended and does not come back: nothing more can be measured."""


class AnalyzedServer(Protocol):
    """Serves the profiled models under one configuration after the other."""

    @property
    def address(self) -> Address:
        """Where requests are sent, in the protocol that is measured."""

    def load(self, overrides: Overrides) -> Configs:
        """Serve all models, those of ``overrides`` with these changes to the repository's configuration.

        Returns the configurations in force, also those of the models that an ensemble is made of, before its own.
        Raises ServerGone, and ConchError for a configuration that does not load.
        """

    def check(self) -> None:
        """Raise ServerGone for a server that is not there any more."""

    def complaints(self) -> str:
        """What the server has complained of since the last load; empty where its log is not known."""

    def restart(self) -> None:
        """Have the server again after :class:`ServerGone`, or where a model answers nothing.

        Raises ServerLost where it does not come back.  A server that somebody else has started is only waited for.
        """

    def close(self) -> None:
        """Leave everything as it was before; raises INTERNAL, naming what could not be."""
