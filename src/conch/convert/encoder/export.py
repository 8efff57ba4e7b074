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
from conch.convert.libraries import quiet, reason
from conch.errors import internal

#: The opset that the newer exporter writes without converting, and that ONNX Runtime 1.14, OpenVINO 2023 and
#: TensorRT 8.6 read.
OPSET: Final = 18
#: What is traced: two sequences with padding, so that no step can be left out for want of it.
TRACED: Final = (2, 7)


def export(network: ReferenceNetwork, path: Path) -> str:
    """Write ``path``; returns which exporter did.  INTERNAL with both reasons when neither gives an agreeing file."""
    reasons = []
    for exporter, write in (("torchscript", by_tracing), ("dynamo", by_dynamo)):
        try:
            with quiet():
                attempt(network, path, write)
                onnx_graph.verify(path, network)
            return exporter
        except Exception as error:  # anything may go wrong inside an exporter; the next one is tried
            reasons.append(f"{exporter}: {reason(error)}")
    raise internal(f"the export to ONNX failed ({'; '.join(reasons)})")


def attempt(network: ReferenceNetwork, path: Path, write: Callable[[Any, ReferenceNetwork, Path], None]) -> None:
    """Export into a folder of its own, since the weights of large networks come as a crowd of files."""
    import onnx

    with tempfile.TemporaryDirectory(dir=path.parent, prefix="export-") as folder:
        file = Path(folder) / "model.onnx"
        write(wrapped(network), network, file)
        onnx_graph.write(onnx.load(file), path)


def wrapped(network: ReferenceNetwork) -> Any:
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
    """The older exporter: what one run computes, with branches as that run took them."""
    import torch

    torch.onnx.export(
        module,
        example(network),
        str(file),
        dynamo=False,
        input_names=list(network.inputs),
        output_names=list(network.outputs),
        dynamic_axes={name: axes(network, name) for name in (*network.inputs, *network.outputs)},
        opset_version=OPSET,
    )


def by_dynamo(module: Any, network: ReferenceNetwork, file: Path) -> None:
    """The newer exporter: the network's program with symbolic sizes."""
    import torch

    sizes = {"sequences": torch.export.Dim("sequences"), "tokens": torch.export.Dim("tokens")}
    shapes = tuple({axis: sizes[size] for axis, size in axes(network, name).items()} for name in network.inputs)
    torch.onnx.export(
        module,
        example(network),
        str(file),
        dynamo=True,
        input_names=list(network.inputs),
        output_names=list(network.outputs),
        dynamic_shapes=(shapes,),
        opset_version=OPSET,
        verbose=False,
    )


def example(network: ReferenceNetwork) -> tuple[Any, ...]:
    """The traced inputs, in order."""
    import torch

    sequences, tokens = TRACED
    arrays = network.example(sequences, min(tokens, network.longest))
    return tuple(torch.from_numpy(arrays[name]) for name in network.inputs)


def axes(network: ReferenceNetwork, name: str) -> dict[int, str]:
    """The dynamic axes of an input or output."""
    if network.inputs == ("pixel_values",):
        return {0: "sequences"}
    if name in network.outputs and not network.gives_tokens:
        return {0: "sequences"}
    return {0: "sequences", 1: "tokens"}
