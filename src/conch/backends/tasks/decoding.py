"""Arguments of transformers' ``generate`` in requests, and a stopping criterion for cancelled requests.

Used by text-to-text models and speech recognition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, Final

from conch.backends.base.arrays import Request
from conch.core.errors import invalid
from conch.core.inference import TensorSpec

#: Optional inputs by name: datatype, minimum and maximum.
PARAMETERS: Final[Mapping[str, tuple[str, float, float]]] = {
    "max_new_tokens": ("INT32", 1, 1 << 16),
    "max_length": ("INT32", 1, 1 << 16),
    "min_length": ("INT32", 0, 1 << 16),
    "num_beams": ("INT32", 1, 32),
    "do_sample": ("BOOL", 0, 1),
    "temperature": ("FP32", 1e-3, 100.0),
    "top_k": ("INT32", 1, 1 << 20),
    "top_p": ("FP32", 1e-6, 1.0),
}

#: The default limit of generated tokens, if neither the checkpoint nor the request sets one.
DEFAULT_NEW_TOKENS: Final = 256


def generation_inputs(*names: str) -> list[TensorSpec]:
    """Return the optional inputs for the arguments ``names`` (default: all of ``PARAMETERS``), one value each."""
    return [TensorSpec(name, PARAMETERS[name][0], (1,), optional=True) for name in names or PARAMETERS]


def generation_arguments(
    request: Request, names: Sequence[str] = tuple(PARAMETERS), *, most_tokens: int = 0
) -> dict[str, Any]:
    """Return the inputs ``names`` that ``request`` contains, as arguments of ``generate``.

    ``most_tokens`` is the number of tokens that the model can generate; 0 means no limit. Raises INVALID_ARG, naming
    the input, for a value out of range.
    """
    arguments: dict[str, Any] = {}
    for name in names:
        value = request.option(name)
        if value is None:
            continue
        _, least, greatest = PARAMETERS[name]
        if most_tokens and name in ("max_new_tokens", "max_length", "min_length"):
            greatest = most_tokens
        if not (isfinite(value) and least <= value <= greatest):
            raise invalid(f"input '{name}' is {value:g}; it must be between {least:g} and {greatest:g}")
        arguments[name] = value
    return arguments


def stop_when_cancelled(requests: Sequence[Request]) -> Any:
    """Return a ``StoppingCriteriaList`` that ends the rows of cancelled requests; ``requests`` has one entry per row.

    With beam search, generation ends only when all requests are cancelled.
    """
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Cancelled(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            rows = input_ids.shape[0]
            if rows == len(requests):
                done = [request.cancelled for request in requests]
            else:
                done = [all(request.cancelled for request in requests)] * rows
            return torch.tensor(done, dtype=torch.bool, device=input_ids.device)

    return StoppingCriteriaList([Cancelled()])
