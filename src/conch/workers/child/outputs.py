"""Warns if outputs differ from the declarations in the model's configuration.

An output may be undeclared or missing, or have another datatype, shape or number of rows. The responses stay as in
Triton: undeclared outputs are dropped, all others are sent as the model returned them, without an error. Used by all
backends, in any thread of a worker, and by the server for remote models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, Callable

from conch.core.tensors import PROTOCOL_NAME

#: Name, datatype, shape and data of an output.
Output = tuple[str, str, Sequence[int], Any]

#: Maximum number of warnings per worker, because a model may generate output names.
_MOST = 16


class OutputWatch:
    """Checks the responses of the model ``name``; ``warn`` logs a message."""

    def __init__(self, name: str, warn: Callable[[str], None]) -> None:
        self._name = name
        self._warn = warn
        #: Whether the first dimension of tensors is the batch dimension.
        self.batches = False
        #: Declared datatypes (protocol names) by output.
        self.declared: dict[str, str] = {}
        #: Declared dimensions of the model's outputs without the batch dimension; -1 matches any.
        self._dims: dict[str, list[int]] = {}
        #: The last valid shape of each output, without the batch dimension; avoids repeated checks.
        self._fitting: dict[str, Sequence[int]] = {}
        self._told: set[tuple[str, str]] = set()

    def declare(self, config: Mapping[str, Any]) -> None:
        """Set the declared outputs from the model's effective configuration."""
        self.batches = config.get("max_batch_size", 0) > 0
        self.declared = {output["name"]: PROTOCOL_NAME[output["data_type"]] for output in config.get("output", ())}
        self._dims = {output["name"]: model_dims(output) for output in config.get("output", ()) if "dims" in output}
        for state in (config.get("sequence_batching") or {}).get("state", ()):
            self.declared.setdefault(state["output_name"], PROTOCOL_NAME.get(state["data_type"], "<invalid>"))

    def look(self, outputs: Sequence[Output], wanted: Set[str], whole: bool, rows: int | None) -> None:
        """Check a response to a request with ``rows`` rows for the outputs ``wanted``.

        Warns of missing outputs only if ``whole`` is set. ``rows`` is None if the response may have any number of rows.
        """
        declared = self.declared
        for name, datatype, shape, _ in outputs:
            if name not in wanted or datatype != declared.get(name):
                break
            if rows is not None and (not shape or shape[0] != rows):
                break
            if self._fitting.get(name) != (shape[1:] if self.batches else shape) and not self._fits(name, shape):
                break
        else:
            if not whole or len(outputs) == len(wanted):
                return  # the common case
        self._explain(outputs, wanted, whole, rows)

    def _explain(self, outputs: Sequence[Output], wanted: Set[str], whole: bool, rows: int | None) -> None:
        """Warn of each fault of a response, once per output and kind of fault."""
        for name, datatype, shape, _ in outputs:
            if name in wanted:
                self._explain_output(name, datatype, shape, rows)
            elif name not in self.declared and self._is_news(name, "undeclared"):
                declared = ", ".join(f"'{name}'" for name in sorted(self.declared))
                self._warn(
                    f"model '{self._name}' gave the output '{name}', which its configuration does not declare "
                    f"(it declares {declared}); clients do not get it"
                )
        names = {output[0] for output in outputs}
        for name in sorted(wanted - names) if whole else ():
            if self._is_news(name, "missing"):
                self._warn(
                    f"model '{self._name}' did not give the output '{name}', which its configuration declares and a "
                    "request wanted; its response came without it"
                )

    def _explain_output(self, name: str, datatype: str, shape: Sequence[int], rows: int | None) -> None:
        declared = self.declared.get(name, datatype)
        if datatype != declared and self._is_news(name, "datatype"):
            self._warn(
                f"model '{self._name}' gave the output '{name}' as {datatype}, but its configuration declares it as "
                f"{declared}; clients get {datatype}"
            )
        if rows is not None and list(shape[:1]) != [rows] and self._is_news(name, "rows"):
            self._warn(
                f"model '{self._name}' gave the output '{name}' in the shape {list(shape)} to a request whose batch "
                f"size is {rows}, which the first dimension must be; it is sent unchanged"
            )
        elif not self._fits(name, shape) and self._is_news(name, "shape"):
            dims = [-1] * self.batches + self._dims[name]
            self._warn(
                f"model '{self._name}' gave the output '{name}' in the shape {list(shape)}, but its configuration "
                f"declares it as {dims}; it is sent unchanged"
            )

    def _fits(self, name: str, shape: Sequence[int]) -> bool:
        """Return whether an output has the declared dimensions, apart from the batch dimension."""
        dims = self._dims.get(name)
        if dims is None:
            return True
        own = shape[1:] if self.batches else shape
        if self.batches and not shape:
            return False
        if len(own) != len(dims) or any(dim not in (-1, size) for dim, size in zip(dims, own)):
            return False
        self._fitting[name] = own
        return True

    def _is_news(self, name: str, fault: str) -> bool:
        if (name, fault) in self._told or len(self._told) >= _MOST:
            return False
        self._told.add((name, fault))
        return True


def model_dims(tensor: Mapping[str, Any]) -> list[int]:
    """Return the dimensions that the model uses for a tensor: ``reshape`` if given, else ``dims``."""
    reshape = tensor.get("reshape")
    return [int(dim) for dim in (tensor["dims"] if reshape is None else reshape.get("shape", ()))]
