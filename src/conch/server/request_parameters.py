"""The parameters that requests of a model may have, where its backend is one of conch's own.

In Triton's protocol a request may carry any parameter, and a backend ignores those that it does not know; a misspelt
option then changes nothing, and nobody is told.  Requests of Python models and of ensembles stay like that.  The wire
formats call this for what a client sends; parameters that the server itself adds (forwarded headers) are not checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from conch.backends.table import RequestParameters
from conch.errors import did_you_mean, invalid

#: How alike two names are (``difflib``'s ratio) when an unknown one is refused for it, and when it is only suggested.
_MISSPELT = 0.85
_SUGGESTED = 0.6
#: What clients of the protocol send to any server: the member ``id`` of a body for ``generate``, which is a parameter
#: as well, as in Triton; what MLServer's clients say of their tensors; and what KServe's pass on from HTTP to gRPC.
_PROTOCOL = frozenset({"id", "content_type", "headers", "binary_data_output"})
#: How many names that have been judged are remembered for a model, and the longest that is compared with others.
_REMEMBERED = 256
_LONGEST = 64
#: How many unknown names a request may have: to judge one takes a fifth of a millisecond.
_MOST_UNKNOWN = 64


class CheckParameters:
    """The check for requests of ``model``, which has ``inputs``: raises INVALID_ARG for a name that is not accepted."""

    def __init__(self, model: str, accepted: RequestParameters, inputs: Iterable[str]) -> None:
        self._model = model
        self._names = accepted.names | _PROTOCOL
        self._others = accepted.others
        self._inputs = frozenset(inputs)
        self._known = accepted.names | self._inputs
        # To compare a name with all that are known takes longer than all else that is done with a small request.
        self._judged = lru_cache(_REMEMBERED)(self._problem)

    def __call__(self, names: Iterable[str]) -> None:
        unknown = 0
        for name in names:
            if name not in self._names:
                problem = self._judged(name) if len(name) <= _LONGEST else self._problem(name)
                unknown += 1
                if not problem and unknown > _MOST_UNKNOWN:
                    problem = f"the request has more than {_MOST_UNKNOWN} parameters that model '{self._model}' ignores"
                if problem:
                    raise invalid(problem)

    def _problem(self, name: str) -> str:
        """Why the name is refused; empty where it is accepted."""
        if name in self._inputs:
            if self._others:
                return ""
            return f"'{name}' is an input of model '{self._model}', not a parameter: send it as a tensor"
        likeness = _MISSPELT if self._others else _SUGGESTED
        hint = did_you_mean(name, self._known, likeness=likeness)
        if hint:
            return f"parameter '{name}' is not known to model '{self._model}'; {hint}"
        if self._others:
            return ""
        known = ", ".join(sorted(self._known))
        return f"parameter '{name}' is not known to model '{self._model}'; its requests have {known}"
