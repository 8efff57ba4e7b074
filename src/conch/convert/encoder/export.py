"""A network to ONNX in fp32, with dynamic numbers of sequences and tokens, checked against torch.

Two exporters: torch's older one, which traces, gives graphs whose attention ONNX Runtime's optimiser recognises;
the newer one (dynamo) takes networks that tracing gets wrong.  The first whose file agrees with torch is taken.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from conch.convert.encoder import onnx_graph
from conch.convert.encoder.network import ReferenceNetwork
from conch.convert.libraries import describe_error, silence_libraries
from conch.errors import internal

#: The opset that the newer exporter writes without converting, and that ONNX Runtime 1.14, OpenVINO 2023 and
#: TensorRT 8.6 read.
OPSET: Final = 18
#: Sequences and tokens of what is traced: two sequences with padding, so that no step can be left out for want of it.
TRACED: Final = (2, 7)


def export(network: ReferenceNetwork, path: Path) -> str:
    """Write ``path``; returns which exporter did.  INTERNAL with both reasons when neither gives an agreeing file."""
    reasons = []
    for exporter, write in (("torchscript", by_tracing), ("dynamo", by_dynamo)):
        try:
            with silence_libraries():
                _write(network, path, write)
                onnx_graph.verify(path, network)
            return exporter
        except Exception as error:  # anything may go wrong inside an exporter; the next one is tried
            reasons.append(f"{exporter}: {describe_error(error)}")
    raise internal(f"the export to ONNX failed ({'; '.join(reasons)})")


def _write(network: ReferenceNetwork, path: Path, write: Callable[[Any, ReferenceNetwork, Path], None]) -> None:
    """Export into a folder of its own, since the weights of large networks come as a crowd of files."""
    import onnx

    with tempfile.TemporaryDirectory(dir=path.parent, prefix="export-") as folder:
        file = Path(folder) / "model.onnx"
        write(_positional(network), network, file)
        onnx_graph.write(onnx.load(file), path)


def _positional(network: ReferenceNetwork) -> Any:
    """The network with inputs by position and outputs as a tuple."""
    import torch

    class Positional(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network.module

        def forward(self, *arrays: Any) -> tuple[Any, ...]:
            answer = self.network(**dict(zip(network.inputs, arrays, strict=True)), return_dict=True)
            return tuple(answer[name] for name in network.outputs)

    return Positional().eval()


def by_tracing(module: Any, network: ReferenceNetwork, file: Path) -> None:
    """Export with the older exporter: what one run computes, with branches as that run took them."""
    names = (*network.inputs, *network.outputs)
    _export(module, network, file, dynamo=False, dynamic_axes={name: _axes(network, name) for name in names})


def by_dynamo(module: Any, network: ReferenceNetwork, file: Path) -> None:
    """Export with the newer exporter: the network's program with symbolic sizes."""
    import torch

    sizes = {size: torch.export.Dim(size) for size in ("sequences", "tokens")}
    shapes = tuple({axis: sizes[size] for axis, size in _axes(network, name).items()} for name in network.inputs)
    _export(module, network, file, dynamo=True, dynamic_shapes=(shapes,), verbose=False)


def _export(module: Any, network: ReferenceNetwork, file: Path, **settings: Any) -> None:
    import torch

    arrays = network.example(*TRACED)
    torch.onnx.export(
        module,
        tuple(torch.from_numpy(arrays[name]) for name in network.inputs),
        str(file),
        input_names=list(network.inputs),
        output_names=list(network.outputs),
        opset_version=OPSET,
        **settings,
    )


def _axes(network: ReferenceNetwork, name: str) -> dict[int, str]:
    """The dynamic axes of an input or output."""
    if name in network.outputs and not network.outputs_have_tokens:
        return {0: "sequences"}
    return {0: "sequences", 1: "tokens"}
