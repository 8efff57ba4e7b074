"""The parameters that requests of a model may have, where its backend is one of conch's own.

In Triton's protocol a request may carry any parameter, and a backend ignores those that it does not know; a misspelt
option then changes nothing, and nobody is told.  Requests of Python models and of ensembles stay like that.  The wire
formats call this for what a client sends; parameters that the server itself adds (forwarded headers) are not checked.
"""

from __future__ import annotations

from collections.abc import Iterable

from conch.backends.table import RequestParameters
from conch.config.parameters import nearest
from conch.errors import ConchError, invalid

#: How alike two names are (``difflib``'s ratio) when an unknown one is refused for it, and when it is only suggested.
_MISSPELT = 0.85
_SUGGESTED = 0.6
#: The member ``id`` of a body for ``generate`` is a parameter as well, as in Triton.
_ID = "id"


class CheckParameters:
    """The check for requests of ``model``, which has ``inputs``: raises INVALID_ARG for a name that is not accepted."""

    def __init__(self, model: str, accepted: RequestParameters, inputs: Iterable[str]) -> None:
        self._model = model
        self._names = accepted.names | {_ID}
        self._others = accepted.others
        self._inputs = frozenset(inputs)
        self._known = accepted.names | self._inputs

    def __call__(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._names:
                problem = self._problem(name)
                if problem is not None:
                    raise problem

    def _problem(self, name: str) -> ConchError | None:
        if name in self._inputs:
            if self._others:
                return None
            return invalid(f"'{name}' is an input of model '{self._model}', not a parameter: send it as a tensor")
        suggestion = nearest(name, self._known, _MISSPELT if self._others else _SUGGESTED)
        if suggestion:
            return invalid(f"parameter '{name}' is not known to model '{self._model}'; did you mean '{suggestion}'?")
        if self._others:
            return None
        known = ", ".join(sorted(self._known))
        return invalid(f"parameter '{name}' is not known to model '{self._model}'; its requests have {known}")
