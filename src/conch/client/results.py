"""The result of an inference request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conch.core.errors import invalid
from conch.core.inference import ParameterValue


@dataclass(frozen=True, slots=True)
class InferResult:
    """One response: the outputs as NumPy arrays by name, with the batch dimension if the model has one.

    The type of an array depends on the datatype that the model declares, never on the data: numbers and bools have the
    NumPy type of the same name, BF16 becomes float32, and BYTES becomes an array of ``bytes`` objects. ``texts`` and
    ``text`` decode BYTES. The arrays belong to the caller.
    """

    model_name: str
    model_version: str
    outputs: Mapping[str, NDArray[Any]]
    id: str = ""
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return the output ``name``. Raises KeyError, which lists the existing names."""
        try:
            return self.outputs[name]
        except KeyError:
            raise KeyError(f"no output '{name}': the response has {', '.join(self.outputs) or 'none'}") from None

    @property
    def text(self) -> str:
        """The only text of the response, in ``text_output`` or in its only BYTES output.

        Raises INVALID_ARG if there is not exactly one text.
        """
        texts = self.texts()
        if len(texts) != 1:
            raise invalid(f"the response of model '{self.model_name}' has {len(texts)} texts: read them with texts()")
        return texts[0]

    def texts(self, name: str = "") -> list[str]:
        """Return the texts of the output ``name``, row by row; by default, of ``text_output`` or the only BYTES output.

        Raises INVALID_ARG for an output that is not BYTES or not UTF-8, KeyError for an unknown output.
        """
        name = name or self._text_output()
        array = self[name]
        if array.dtype != np.object_:
            raise invalid(f"output '{name}' of model '{self.model_name}' holds {array.dtype}, not texts")
        try:
            return [element.decode() for element in array.flat]
        except UnicodeDecodeError:
            raise invalid(f"output '{name}' of model '{self.model_name}' is not UTF-8: read its bytes") from None

    def _text_output(self) -> str:
        if "text_output" in self.outputs:
            return "text_output"
        names = [name for name, array in self.outputs.items() if array.dtype == np.object_]
        if len(names) != 1:
            raise invalid(
                f"the response of model '{self.model_name}' has {', '.join(names) or 'no output'} with texts: "
                "pass the name of one to texts()"
            )
        return names[0]
