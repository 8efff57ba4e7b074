"""The graph of the peers: all-MiniLM-L6-v2 as a user without conch would make it.

    python -m benchmarks.peers.graph TARGET

PyTorch's own exporter with its defaults, then ONNX Runtime's dynamic quantisation with its defaults.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from benchmarks.peers.environment import locked
from benchmarks.texts import SENTENCE, checkpoint
from tests.oracle.install import ROOT

INPUTS: Final = ("input_ids", "attention_mask", "token_type_ids")


def graph() -> Path:
    """The file, made on first use by a process of its own."""
    target = ROOT / "minilm-int8.onnx"
    ROOT.mkdir(exist_ok=True)
    with locked(ROOT / "graph.lock"):
        if not target.exists():
            print("Exporting the peers' graph ...", file=sys.stderr)
            command = [sys.executable, "-m", "benchmarks.peers.graph", str(target)]
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT.parent)
            if done.returncode:
                raise RuntimeError(f"the peers' graph: {done.stderr[-1000:]}")
    return target


def write(target: Path) -> None:
    """Export, quantise, and let the file appear complete."""
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from transformers import AutoModel, AutoTokenizer

    class Hidden(torch.nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
            return self.model(input_ids, attention_mask, token_type_ids).last_hidden_state

    model = Hidden(AutoModel.from_pretrained(checkpoint())).eval()
    tokens = AutoTokenizer.from_pretrained(checkpoint())([SENTENCE, "short"], padding=True, return_tensors="pt")
    sizes = {0: torch.export.Dim("rows"), 1: torch.export.Dim("tokens")}
    with TemporaryDirectory(dir=target.parent) as folder:
        plain, small = Path(folder) / "plain.onnx", Path(folder) / "int8.onnx"
        torch.onnx.export(
            model,
            tuple(tokens[name] for name in INPUTS),
            str(plain),
            dynamo=True,
            input_names=list(INPUTS),
            output_names=["last_hidden_state"],
            dynamic_shapes=(sizes, sizes, sizes),
            external_data=False,
        )
        quantize_dynamic(plain, small, weight_type=QuantType.QInt8)
        small.rename(target)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
