"""A PyTorch program in a file: TorchScript, or what ``torch.export`` has saved.  Used by the backend ``pytorch``."""

from __future__ import annotations

import importlib
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from conch import extras
from conch.backends.graphs.signature import GraphTensor
from conch.errors import ConchError, internal, invalid, one_line, unsupported

#: The suffix of ``torch.export`` programs; all other files are TorchScript.
EXPORTED: Final = ".pt2"
#: What a package of AOTInductor's has among its files.
_COMPILED: Final = "/aotinductor/"
#: Protocol names of PyTorch's types, without ``torch.``.
DATATYPES: Final[dict[str, str]] = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8",
    "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "bfloat16": "BF16", "float32": "FP32",
    "float64": "FP64",
}  # fmt: skip


def datatype(dtype: object) -> str:
    """The protocol's name of a ``torch.dtype``, or the type's own where there is none."""
    name = str(dtype).removeprefix("torch.")
    return DATATYPES.get(name, name)


class TorchProgram(ABC):
    """A loaded program, which several threads may run at once.

    ``arguments`` are the names of forward's; ``keyed`` says that it takes one dictionary of tensors in their place, and
    ``texts`` are those of the arguments that are lists of strings.  ``inputs`` and ``outputs`` are its tensors where
    the file describes them, else empty.
    """

    arguments: tuple[str, ...]
    keyed: bool = False
    texts: frozenset[str] = frozenset()
    inputs: tuple[GraphTensor, ...] = ()
    outputs: tuple[GraphTensor, ...] = ()

    @abstractmethod
    def run(self, values: Mapping[str, Any]) -> Any:
        """What forward returns for its arguments by name, or for one dictionary where it is ``keyed``."""


def open_program(path: Path, device: str) -> TorchProgram:
    """Load the file to ``device`` (``cpu``, ``cuda:0``; empty for that which it was saved with).

    Raises UNSUPPORTED without PyTorch, INVALID_ARG for a file that is none.
    """
    torch = extras.load("backend 'pytorch'", "torch")
    try:
        return _Exported(torch, path, device) if path.suffix == EXPORTED else _Script(torch, path, device)
    except ConchError:
        raise
    except Exception as error:
        raise invalid(f"failed to load '{path.name}': {one_line(error)}") from None


class _Script(TorchProgram):
    """TorchScript, traced or scripted."""

    def __init__(self, torch: Any, path: Path, device: str) -> None:
        self._module = torch.jit.load(str(path), map_location=device or None)
        self._module.eval()
        arguments = [(one.name, str(one.type)) for one in self._module.forward.schema.arguments[1:]]
        self.arguments = tuple(name for name, _ in arguments)
        self.keyed = [kind for _, kind in arguments] == ["Dict[str, Tensor]"]
        self.texts = frozenset(name for name, kind in arguments if kind == "List[str]")
        for name, kind in arguments:
            if not self.keyed and kind not in ("Tensor", "Optional[Tensor]", "List[str]"):
                raise unsupported(
                    f"argument '{name}' of forward is {kind}: it must be a tensor or a list of strings, or the only "
                    "one and a dictionary of tensors"
                )

    def run(self, values: Mapping[str, Any]) -> Any:
        return self._module(dict(values)) if self.keyed else self._module(**values)


class _Exported(TorchProgram):
    """A program of ``torch.export.save``."""

    def __init__(self, torch: Any, path: Path, device: str) -> None:
        with zipfile.ZipFile(path) as archive:
            if any(_COMPILED in name for name in archive.namelist()):
                raise unsupported(
                    f"'{path.name}' has been compiled by AOTInductor for one kind of machine: save the program itself, "
                    "with torch.export.save"
                )
        program = torch.export.load(str(path))
        if device:
            program = importlib.import_module("torch.export.passes").move_to_device_pass(program, device)
        self._pytree = torch.utils._pytree
        self._arranged = program.call_spec.in_spec
        values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
        results = next(node for node in program.graph.nodes if node.op == "output").args[0]
        self.arguments = tuple(map(str, program.graph_signature.user_inputs))
        if self._arranged.num_leaves != len(self.arguments):
            raise unsupported(f"'{path.name}' takes {self._arranged} values, and not all of them are tensors")
        self.inputs = tuple(_described(name, values[name]) for name in self.arguments)
        kept = results[len(results) - len(program.graph_signature.user_outputs) :]
        self.outputs = tuple(_described(f"OUTPUT__{index}", node.meta["val"]) for index, node in enumerate(kept))
        self._module = program.module()

    def run(self, values: Mapping[str, Any]) -> Any:
        leaves: Sequence[Any] = [values[name] for name in self.arguments]
        positional, named = self._pytree.tree_unflatten(leaves, self._arranged)
        result = self._module(*positional, **named)
        return result if isinstance(result, dict) else self._pytree.tree_leaves(result)


def _described(name: str, value: Any) -> GraphTensor:
    if not hasattr(value, "dtype"):
        raise unsupported(f"'{name}' is {type(value).__name__}, not a tensor")
    return GraphTensor(name, datatype(value.dtype), tuple(size if type(size) is int else -1 for size in value.shape))


def failed(error: Exception) -> ConchError:
    """The error with the text that Triton reports for an exception of PyTorch's."""
    return error if isinstance(error, ConchError) else internal(f"PyTorch execute failure: {str(error).strip()}")
