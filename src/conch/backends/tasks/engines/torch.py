"""The engine ``torch``: runs a checkpoint in transformers, on the CPU or a GPU."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array
from conch.backends.base.weights import require_tensors
from conch.backends.tasks.engines.base import NetworkEngine
from conch.core.errors import invalid, one_line
from conch.machine import extras
from conch.machine.cores import divided, usable_cores

#: The outputs of each head, with transformers' names.
_OUTPUTS: Final[dict[str, tuple[str, ...]]] = {
    "AutoModel": ("last_hidden_state",),
    "AutoModelForTextEncoding": ("last_hidden_state",),
    "AutoModelForQuestionAnswering": ("start_logits", "end_logits"),
}
_PRECISIONS: Final = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class TorchEngine(NetworkEngine):
    """The network of a checkpoint, loaded with transformers' class ``head``, for ``instances`` concurrent threads.

    ``threads`` cores (0: all usable cores) are divided among the threads. ``dtype`` is ``float32``, ``bfloat16``,
    ``float16`` or ``auto`` (FP32 on a CPU, the stored type on a GPU). Raises UNSUPPORTED if torch or transformers is
    not installed, INVALID_ARG for a checkpoint that cannot be loaded.
    """

    name = "torch"

    def __init__(
        self,
        directory: Path,
        head: str,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        device_id: int = 0,
        threads: int = 0,
        instances: int = 1,
        trust_remote_code: bool = False,
    ) -> None:
        extras.require("engine 'torch'", "torch", "transformers")
        import torch
        import transformers

        self._torch = torch
        logging: Any = transformers.utils.logging
        logging.disable_progress_bar()
        self._directory = directory
        if device == "cpu" and dtype == "auto":
            dtype = "float32"
        try:
            network, self._report = getattr(transformers, head).from_pretrained(
                directory,
                dtype=dtype if dtype == "auto" else getattr(self._torch, dtype),
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # require_tensors rejects those that affect outputs, by name
            )
            self.device = device
            self._device = self._torch.device("cpu" if device == "cpu" else f"{device}:{device_id}")
            self._network = network.eval().to(self._device)
        except Exception as error:
            raise invalid(f"'{directory}' cannot be loaded as {head}: {one_line(error)}") from error
        stored = str(self._network.dtype).removeprefix("torch.")
        self.precision = _PRECISIONS.get(stored, stored)
        # Networks number positions differently, so each computes its own.
        self.inputs = frozenset(inspect.signature(self._network.forward).parameters) - {"position_ids"}
        self.outputs = _OUTPUTS.get(head, ("logits",))
        self._floats = self._network.dtype
        self._threads = divided(threads or usable_cores(), instances)
        self._thread = threading.local()

    def require_tensors(self, arrays: Mapping[str, Array]) -> None:
        require_tensors(self._network, self._report, lambda: self.run(arrays), self._directory)

    def reference(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        return self.run(arrays)

    def run(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        torch = self._torch
        if not hasattr(self._thread, "sized"):
            # OpenMP keeps a pool, and its size, per calling thread.
            torch.set_num_threads(self._threads)
            self._thread.sized = True
        with torch.inference_mode():
            answer = self._network(**{name: self._tensor(arrays[name]) for name in arrays if name in self.inputs})
            return {name: answer[name].float().cpu().numpy() for name in self.outputs}

    def _tensor(self, array: Array) -> Any:
        # PyTorch warns about read-only memory, so such arrays are copied; they are small.
        tensor = self._torch.from_numpy(array if array.flags.writeable else np.array(array)).to(self._device)
        return tensor.to(self._floats) if tensor.is_floating_point() else tensor
