"""The backend ``pytorch``: serves ``model.pt`` (TorchScript) or ``model.pt2`` (a ``torch.export`` program).

Its instances on one device are threads that share one program. Inputs are named like the arguments of forward, or
``<name>__<index>``, or have the order of the arguments. The same applies to outputs, but results have names only if
forward returns a dictionary.
"""

from __future__ import annotations

import importlib
import re
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import DTYPES, Array, Strings
from conch.backends.base.backend_base import versioned
from conch.backends.base.openmp import ComputeThreads
from conch.backends.graphs import signature
from conch.backends.graphs.graph import ModelFileBackend
from conch.backends.graphs.signature import GraphTensor, SequenceTensors
from conch.config.parameters import Parameter, ParameterTable, parameter_texts
from conch.core.errors import ConchError, internal, invalid, one_line, unsupported
from conch.core.tensors import CONFIG_NAME
from conch.machine import extras
from conch.machine.facts import openmp, openmp_threads, usable_cores

_INDEXED: Final = re.compile(r".+__(\d+)")


def indices(names: Sequence[str], known: Sequence[str]) -> list[int]:
    """Return the index of each of ``names``: its index in ``known``, or the number in its suffix, or its position.

    All names must follow the same rule; otherwise their positions apply.
    """
    if known and all(name in known for name in names):
        return [known.index(name) for name in names]
    numbered = [_INDEXED.fullmatch(name) for name in names]
    if all(numbered):
        return [int(match[1]) for match in numbered if match is not None]
    return list(range(len(names)))


_BOOLEANS: Final = "`true`, `false`"

PARAMETERS: Final = ParameterTable(
    "pytorch",
    (
        Parameter(
            "INFERENCE_MODE", _BOOLEANS, "`true`", "run under `torch.inference_mode`; if false, under `torch.no_grad`"
        ),
        Parameter(
            "DISABLE_OPTIMIZED_EXECUTION",
            _BOOLEANS,
            "`false`",
            "run TorchScript without optimising it during the first runs",
        ),
        Parameter(
            "INTRA_OP_THREAD_COUNT",
            "threads",
            "`OMP_NUM_THREADS` if it is set, else the usable cores, shared by the instances",
            "threads that compute one operator",
        ),
        Parameter("INTER_OP_THREAD_COUNT", "threads", "PyTorch's", "threads that run tasks forked by TorchScript"),
        Parameter("ENABLE_JIT_EXECUTOR", _BOOLEANS, "PyTorch's", "TorchScript's profiling executor"),
        Parameter("ENABLE_JIT_PROFILING", _BOOLEANS, "PyTorch's", "profiling in this executor"),
        Parameter("ENABLE_TENSOR_FUSER", _BOOLEANS, "PyTorch's", "TorchScript's tensor fuser"),
        Parameter("ENABLE_CACHE_CLEANING", _BOOLEANS, "`false`", "release the GPU's cached memory after each run"),
    ),
    # Instances always share weights; NvFuser has been removed from PyTorch.
    accepted=frozenset({"ENABLE_WEIGHT_SHARING", "ENABLE_NVFUSER"}),
)


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """Settings for running a program; ``None`` and 0 leave the choice to PyTorch or, for ``threads``, to conch."""

    inference_mode: bool = True
    optimized: bool = True
    threads: int = 0
    inter_op_threads: int = 0
    jit_executor: bool | None = None
    jit_profiling: bool | None = None
    tensor_fuser: bool | None = None
    cache_cleaning: bool = False


def torch_settings(config: Mapping[str, Any]) -> TorchSettings:
    """Read the settings from a configuration's parameters. Raises INVALID_ARG for an invalid value."""
    parameters = parameter_texts(config)
    return TorchSettings(
        inference_mode=_flag(parameters, "INFERENCE_MODE", True),
        optimized=not _flag(parameters, "DISABLE_OPTIMIZED_EXECUTION", False),
        threads=_count(parameters, "INTRA_OP_THREAD_COUNT"),
        inter_op_threads=_count(parameters, "INTER_OP_THREAD_COUNT"),
        jit_executor=_choice(parameters, "ENABLE_JIT_EXECUTOR"),
        jit_profiling=_choice(parameters, "ENABLE_JIT_PROFILING"),
        tensor_fuser=_choice(parameters, "ENABLE_TENSOR_FUSER"),
        cache_cleaning=_flag(parameters, "ENABLE_CACHE_CLEANING", False),
    )


def _flag(parameters: Mapping[str, str], name: str, default: bool) -> bool:
    chosen = _choice(parameters, name)
    return default if chosen is None else chosen


def _choice(parameters: Mapping[str, str], name: str) -> bool | None:
    if name not in parameters:
        return None
    value = parameters[name].lower()
    if value not in ("true", "false", "1", "0"):
        raise invalid(f"failed to convert {name} '{parameters[name]}' to boolean value: it must be true or false")
    return value in ("true", "1")


def _count(parameters: Mapping[str, str], name: str) -> int:
    text = parameters.get(name, "0")
    if not text.isdecimal() or int(text) >= 1 << 31:
        raise invalid(f"failed to convert {name} '{text}' to integral number: it must be a number of threads")
    return int(text)


#: The suffix of ``torch.export`` programs; all other files are TorchScript.
EXPORTED: Final = ".pt2"
#: Part of the file names in a package compiled by AOTInductor.
_COMPILED: Final = "/aotinductor/"
#: Protocol datatypes by the name of the PyTorch type, without ``torch.``.
DATATYPES: Final[dict[str, str]] = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8",
    "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "bfloat16": "BF16", "float32": "FP32",
    "float64": "FP64",
}  # fmt: skip


def datatype(dtype: object) -> str:
    """Return the protocol datatype of a ``torch.dtype``, or its PyTorch name if the protocol lacks it."""
    name = str(dtype).removeprefix("torch.")
    return DATATYPES.get(name, name)


class TorchProgram(ABC):
    """A loaded program, which several threads may run concurrently.

    ``arguments`` are the names of forward's arguments. ``keyed``: forward takes one dictionary of tensors instead.
    ``texts`` are the arguments that are lists of strings. ``inputs`` and ``outputs`` are its tensors if the file
    describes them, else empty.
    """

    arguments: tuple[str, ...]
    keyed: bool = False
    texts: frozenset[str] = frozenset()
    inputs: tuple[GraphTensor, ...] = ()
    outputs: tuple[GraphTensor, ...] = ()

    @abstractmethod
    def run(self, values: Mapping[str, Any]) -> Any:
        """Call forward with its arguments by name, or with one dictionary if it is ``keyed``."""


def open_program(path: Path, device: str) -> TorchProgram:
    """Load a program to ``device`` (``cpu``, ``cuda:0``; empty: the device that it was saved with).

    Raises UNSUPPORTED if PyTorch is not installed or the program cannot be served, INVALID_ARG for an invalid file.
    """
    torch = extras.load("backend 'pytorch'", "torch")
    try:
        return _Exported(torch, path, device) if path.suffix == EXPORTED else _Script(torch, path, device)
    except ConchError:
        raise
    except Exception as error:
        raise invalid(f"failed to load '{path.name}': {one_line(error)}") from None


class _Script(TorchProgram):
    """A TorchScript program, traced or scripted."""

    def __init__(self, torch: Any, path: Path, device: str) -> None:
        self._module = torch.jit.load(str(path), map_location=device or None)
        self._module.eval()
        arguments = [(argument.name, str(argument.type)) for argument in self._module.forward.schema.arguments[1:]]
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
    """A program saved by ``torch.export.save``."""

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
    """Convert a PyTorch exception to an error with Triton's message."""
    return error if isinstance(error, ConchError) else internal(f"PyTorch execute failure: {str(error).strip()}")


class PyTorchBackend(ModelFileBackend):
    """One program on one device."""

    _torch: Any
    _program: TorchProgram
    _settings: TorchSettings
    #: The device of the inputs: ``cpu``, ``cuda:0``, or empty if the program keeps the device that it was saved with.
    _device = ""
    #: Datatypes by input name, including batch inputs and sequence tensors.
    _inputs: dict[str, str]
    #: Arguments of forward by input name.
    _arguments: dict[str, str]
    #: Index of each output in forward's results, by output name; unused if forward returns a dictionary.
    _results: dict[str, int]

    def preloads(self, instance: Mapping[str, Any]) -> tuple[Sequence[str], dict[str, str]]:
        """Return the modules to import, which workers may share, and the environment variables to set before."""
        return ("torch",), openmp(usable_cores(), instance["count"])

    def model_file(self) -> Path:
        return Path(self.model["version_directory"]) / (self.model["filename"] or "model.pt")

    def inspect(self, path: Path) -> TorchProgram:
        program = open_program(path, "cpu")
        if path.suffix != EXPORTED:
            raise invalid(
                f"model '{self.model['name']}' has no inputs or no outputs in its configuration, and TorchScript does "
                f"not contain their datatypes and shapes: add them; forward takes {', '.join(program.arguments)}"
            )
        return program

    def load(self, instance: Mapping[str, Any]) -> None:
        self.check_parameters(PARAMETERS)
        self._settings = settings = torch_settings(self.config)
        self._torch = torch = extras.load("backend 'pytorch'", "torch")
        self._device = {"GPU": f"cuda:{instance['device_id']}", "CPU": "cpu"}.get(instance["kind"], "")
        threads = settings.threads or openmp_threads(usable_cores(), instance["count"])
        if settings.inter_op_threads:
            torch.set_num_interop_threads(settings.inter_op_threads)
        _set_up_jit(torch, settings)
        self._program = program = open_program(self.existing_file(), self._device)
        sequences = SequenceTensors.of(self.config)
        inputs = (*self.config.get("input", ()), *signature.batch_inputs(self.config))
        named = {tensor["name"]: tensor["data_type"] for tensor in inputs}
        self._inputs = {**named, **sequences.controls, **sequences.state_inputs}
        self._arguments = self._match_arguments(self._inputs)
        outputs = [*(tensor["name"] for tensor in self.config.get("output", ())), *sequences.state_outputs]
        self._results = dict(zip(outputs, indices(outputs, [tensor.name for tensor in program.outputs]), strict=True))
        self.compute_threads = ComputeThreads(instance["count"], threads)
        self.runtime_facts = {"engine": versioned("torch"), "threads": str(threads)}

    def infer(self, arrays: dict[str, Array | Strings], outputs: frozenset[str]) -> dict[str, Array | Strings]:
        try:
            with ExitStack() as modes:
                modes.enter_context(
                    self._torch.inference_mode() if self._settings.inference_mode else self._torch.no_grad()
                )
                if not self._settings.optimized:
                    modes.enter_context(self._torch.jit.optimized_execution(False))
                values = {self._arguments[name]: self._to_argument(name, value) for name, value in arrays.items()}
                returned = self._program.run(values)
                results = {name: self._result(name, returned) for name in outputs}
        except Exception as error:
            raise failed(error) from None
        if self._settings.cache_cleaning and self._device.startswith("cuda"):
            self._torch.cuda.empty_cache()
        return results

    def _match_arguments(self, datatypes: Mapping[str, str]) -> dict[str, str]:
        """Return the argument of forward for each input. Raises INVALID_ARG if an input matches no argument."""
        program, names = self._program, list(datatypes)
        if program.keyed:
            return {name: name for name in names}
        positions = indices(names, program.arguments)
        takes = f"forward takes {len(program.arguments)} argument(s): {', '.join(program.arguments)}"
        for name, position in zip(names, positions, strict=True):
            if position >= len(program.arguments):
                raise invalid(f"unable to load model '{self.model['name']}': '{name}' is not an argument: {takes}")
        if len(set(positions)) < len(positions):
            raise invalid(f"unable to load model '{self.model['name']}': two inputs are the same argument, {takes}")
        matched = {name: program.arguments[position] for name, position in zip(names, positions, strict=True)}
        for name, datatype_name in datatypes.items():
            if (datatype_name == "TYPE_STRING") != (matched[name] in program.texts):
                raise invalid(
                    f"unable to load model '{self.model['name']}': TYPE_STRING is for arguments that are lists of "
                    f"strings, and argument '{matched[name]}' of input '{name}' does not fit"
                )
        return matched

    def _to_argument(self, name: str, value: Array | Strings) -> Any:
        """Convert an input to an argument of forward."""
        if isinstance(value, Strings):
            return [
                element if isinstance(element, str) else element.decode("utf-8", "replace")
                for element in value.elements
            ]
        torch = self._torch
        array = value if value.flags.writeable and value.flags.aligned else value.copy()
        of_bits = self._inputs[name] == "TYPE_BF16"
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if of_bits else torch.from_numpy(array)
        return tensor.to(self._device) if self._device.startswith("cuda") else tensor

    def _result(self, name: str, returned: Any) -> Array | Strings:
        """Return an output from the results of forward.

        Raises INTERNAL or INVALID_ARG if it is missing or has another datatype.
        """
        if isinstance(returned, dict):
            if name not in returned:
                raise internal(f"the model returned no '{name}', only {', '.join(map(str, returned))}")
            value = returned[name]
        else:
            several = isinstance(returned, (tuple, list)) and not all(isinstance(element, str) for element in returned)
            values = returned if several else [returned]
            if self._results[name] >= len(values):
                raise invalid(
                    f"The output {name} in the model configuration refers to an output index which doesn't exist. This "
                    f"model has {len(values)} outputs"
                )
            value = values[self._results[name]]
        if isinstance(value, (list, tuple)):
            texts = list(map(str, value))
            return Strings((len(texts), 1) if self._batched else (len(texts),), texts)
        return self._array(name, value)

    def _array(self, name: str, value: Any) -> Array:
        if not self._torch.is_tensor(value):
            raise internal(f"output '{name}' is {type(value).__name__}, and must be a tensor or a list of strings")
        actual, expected = datatype(value.dtype), self._outputs.declared[name]
        if actual != expected:
            raise invalid(
                f"unexpected datatype {CONFIG_NAME.get(actual, actual)} for inference output '{name}', expecting "
                f"{CONFIG_NAME[expected]}"
            )
        tensor = value.detach().cpu().contiguous()
        if actual == "BF16":
            return tensor.view(self._torch.int16).numpy().view(DTYPES["BF16"])  # type: ignore[no-any-return]
        return tensor.numpy()  # type: ignore[no-any-return]


def _set_up_jit(torch: Any, settings: TorchSettings) -> None:
    """Apply the settings to this process's TorchScript runtime."""
    for function, value in (
        (torch._C._jit_set_profiling_executor, settings.jit_executor),
        (torch._C._jit_set_profiling_mode, settings.jit_profiling),
        (torch._C._jit_set_texpr_fuser_enabled, settings.tensor_fuser),
    ):
        if value is not None:
            function(value)
