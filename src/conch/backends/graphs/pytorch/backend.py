"""The backend ``pytorch``: the model is ``model.pt``, TorchScript, or ``model.pt2``, a ``torch.export`` program.

Its instances on one device are threads over one program.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from conch import extras
from conch.backends.graphs import signature
from conch.backends.graphs.pytorch.naming import indices
from conch.backends.graphs.pytorch.parameters import PARAMETERS, TorchSettings, torch_settings
from conch.backends.graphs.pytorch.program import EXPORTED, TorchProgram, datatype, failed, open_program
from conch.backends.graphs.sequence_tensors import SequenceTensors
from conch.backends.native.arrays import DTYPES, Array, Strings
from conch.backends.native.backend import TensorBackend
from conch.backends.native.libraries import versioned
from conch.backends.native.threads import divided, openmp, usable_cores
from conch.errors import internal, invalid, unavailable
from conch.tensors import CONFIG_NAME


class PyTorchBackend(TensorBackend):
    """One program on one device."""

    _torch: Any
    _program: TorchProgram
    _settings: TorchSettings
    #: Where runs take place: ``cpu``, ``cuda:0``, or empty for where the program is.
    _device = ""
    #: The datatype of each input, those that schedulers make among them, by name.
    _inputs: dict[str, str]
    #: The argument of forward that each of them is.
    _arguments: dict[str, str]
    #: The index or key of each output among forward's results, by the output's name.
    _results: dict[str, int]

    def preloads(self, instance: Mapping[str, Any]) -> tuple[Sequence[str], dict[str, str]]:
        """What the worker imports and may share with others, and variables for it."""
        return ("torch",), openmp(usable_cores(), instance["count"])

    def complete(self) -> str:
        """The batch size, tensors and scheduler of a ``torch.export`` program; TorchScript does not tell them."""
        if self.config.get("input") and self.config.get("output"):
            return json.dumps(self.config)
        path = self._path()
        program = open_program(path, "cpu")
        if path.suffix != EXPORTED:
            raise invalid(
                f"model '{self.model['name']}' has no inputs or no outputs in its configuration, and TorchScript does "
                f"not tell their datatypes and shapes: write them; forward takes {', '.join(program.arguments)}"
            )
        batch_size = signature.default_max_batch_size(self.backend_config)
        tensors = SequenceTensors.of(self.config).of_clients(program.inputs, program.outputs)
        completed = signature.complete(self.config, *tensors, batch_size, lambda text: self.log("WARNING", text))
        return json.dumps(completed)

    def load(self, instance: Mapping[str, Any]) -> None:
        self.check_parameters(PARAMETERS)
        self._settings = settings = torch_settings(self.config)
        self._torch = torch = extras.load("backend 'pytorch'", "torch")
        self._device = {"GPU": f"cuda:{instance['device_id']}", "CPU": "cpu"}.get(instance["kind"], "")
        self._threads = settings.threads or divided(usable_cores(), instance["count"])
        if settings.inter_op_threads:
            torch.set_num_interop_threads(settings.inter_op_threads)
        _set_up_jit(torch, settings)
        self._program = program = open_program(self._path(), self._device)
        sequences = SequenceTensors.of(self.config)
        inputs = (*self.config.get("input", ()), *signature.batch_inputs(self.config))
        named = {one["name"]: one["data_type"] for one in inputs}
        self._inputs = {**named, **sequences.controls, **sequences.state_inputs}
        self._arguments = self._matched(self._inputs)
        outputs = [*(one["name"] for one in self.config.get("output", ())), *sequences.state_outputs]
        self._results = dict(zip(outputs, indices(outputs, [tensor.name for tensor in program.outputs]), strict=True))
        self._prepared = threading.local()
        self.runs_with = {"engine": versioned("torch"), "threads": str(self._threads)}

    def infer(self, arrays: dict[str, Array | Strings], outputs: frozenset[str]) -> dict[str, Array | Strings]:
        if not hasattr(self._prepared, "done"):
            self._torch.set_num_threads(self._threads)  # holds for the thread that calls it
            self._prepared.done = True
        try:
            with ExitStack() as modes:
                modes.enter_context(
                    self._torch.inference_mode() if self._settings.inference_mode else self._torch.no_grad()
                )
                if not self._settings.optimized:
                    modes.enter_context(self._torch.jit.optimized_execution(False))
                values = {self._arguments[name]: self._given(name, value) for name, value in arrays.items()}
                returned = self._program.run(values)
                found = {name: self._result(name, returned) for name in outputs}
        except Exception as error:
            raise failed(error) from None
        if self._settings.cache_cleaning and self._device.startswith("cuda"):
            self._torch.cuda.empty_cache()
        return found

    def _path(self) -> Path:
        path = Path(self.model["version_directory"]) / (self.model["filename"] or "model.pt")
        if not path.exists():
            raise unavailable(f"unable to find '{path}' for model '{self.model['name']}'")
        return path

    def _matched(self, datatypes: Mapping[str, str]) -> dict[str, str]:
        """The argument that each input is.  Raises INVALID_ARG where forward has no such argument."""
        program, names = self._program, list(datatypes)
        if program.keyed:
            return {name: name for name in names}
        places = indices(names, program.arguments)
        takes = f"forward takes {len(program.arguments)} argument(s): {', '.join(program.arguments)}"
        for name, place in zip(names, places, strict=True):
            if place >= len(program.arguments):
                raise invalid(f"unable to load model '{self.model['name']}': input '{name}' is none of them, {takes}")
        if len(set(places)) < len(places):
            raise invalid(f"unable to load model '{self.model['name']}': two inputs are the same argument, {takes}")
        matched = {name: program.arguments[place] for name, place in zip(names, places, strict=True)}
        for name, datatype_name in datatypes.items():
            if (datatype_name == "TYPE_STRING") != (matched[name] in program.texts):
                raise invalid(
                    f"unable to load model '{self.model['name']}': TYPE_STRING is for arguments that are lists of "
                    f"strings, and argument '{matched[name]}' of input '{name}' does not fit"
                )
        return matched

    def _given(self, name: str, value: Array | Strings) -> Any:
        """An input as forward takes it."""
        if isinstance(value, Strings):
            return [one if isinstance(one, str) else one.decode("utf-8", "replace") for one in value.elements]
        torch = self._torch
        array = value if value.flags.writeable and value.flags.aligned else value.copy()
        of_bits = self._inputs[name] == "TYPE_BF16"
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if of_bits else torch.from_numpy(array)
        return tensor.to(self._device) if self._device.startswith("cuda") else tensor

    def _result(self, name: str, returned: Any) -> Array | Strings:
        """An output among what forward has returned.  Raises for one that is not there, or of another datatype."""
        if isinstance(returned, dict):
            if name not in returned:
                raise internal(f"the model returned no '{name}', only {', '.join(map(str, returned))}")
            value = returned[name]
        else:
            several = isinstance(returned, (tuple, list)) and not all(isinstance(one, str) for one in returned)
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
        given, wanted = datatype(value.dtype), self._outputs.declared[name]
        if given != wanted:
            raise invalid(
                f"unexpected datatype {CONFIG_NAME.get(given, given)} for inference output '{name}', expecting "
                f"{CONFIG_NAME[wanted]}"
            )
        tensor = value.detach().cpu().contiguous()
        if given == "BF16":
            return tensor.view(self._torch.int16).numpy().view(DTYPES["BF16"])  # type: ignore[no-any-return]
        return tensor.numpy()  # type: ignore[no-any-return]


def _set_up_jit(torch: Any, settings: TorchSettings) -> None:
    """Tell TorchScript's runtime of this process what the parameters ask for."""
    for function, value in (
        (torch._C._jit_set_profiling_executor, settings.jit_executor),
        (torch._C._jit_set_profiling_mode, settings.jit_profiling),
        (torch._C._jit_set_texpr_fuser_enabled, settings.tensor_fuser),
    ):
        if value is not None:
            function(value)
