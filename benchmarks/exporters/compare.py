"""Compares the results of exported graphs with transformers."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.exporters import architectures
from benchmarks.exporters.run import THREADS, Outcome, export, inputs, runner
from conch.convert.libraries import describe_error, silence_libraries

#: Tolerance for a result, relative to the largest value of transformers' result (or to 1).
SAME = 1e-3
HEADS = {
    "feature-extraction": "AutoModel",
    "text-classification": "AutoModelForSequenceClassification",
    "image-classification": "AutoModelForImageClassification",
    "text-generation": "AutoModelForCausalLM",
}
#: The length of a text (tokens), and its divisions into a prompt, two steps and several tokens at a time.
TEXT, ENDS = 28, (12, 13, 14, 25, 28)


def compare(exporter: str, name: str, task: str) -> Outcome:
    """Export one tiny checkpoint and compare the result."""
    settings = (architectures.CAUSAL if task == "text-generation" else architectures.ENCODERS)[name]
    if task != "text-generation" and "image_size" in settings:
        task = "image-classification"
    with tempfile.TemporaryDirectory() as folder, silence_libraries():
        target = Path(folder) / "out"
        target.mkdir()
        try:
            module = architectures.write(Path(folder) / "in", name, HEADS[task], {**architectures.SIZES, **settings})
        except Exception as error:  # from transformers: usually an architecture that it does not have
            return {"absent": describe_error(error)}
        graphs = export(exporter, Path(folder) / "in", task, target)
        return {"differences": (compare_causal if task == "text-generation" else compare_encoder)(module, graphs)}


def compare_encoder(module: Any, graphs: Sequence[Path]) -> dict[str, float]:
    """Return the largest relative difference of each graph; padded positions do not count."""
    import torch

    takes = inspect.signature(module.forward).parameters
    worst = {graph.name: 0.0 for graph in graphs}
    for graph in graphs:
        run = runner(graph)
        for sequences, tokens in ((2, 9), (1, 1), (1, 16), (3, 40), (5, 33)):
            arrays = inputs(module.config, sequences, tokens)
            with torch.inference_mode():
                tensors = {name: torch.from_numpy(array) for name, array in arrays.items() if name in takes}
                expected = module(**tensors, return_dict=True)[0].numpy()
            got, mask = run(arrays)[0], arrays["attention_mask"]
            if "input_ids" in takes and expected.shape[:2] == mask.shape:
                got, expected = got[mask == 1], expected[mask == 1]
            worst[graph.name] = max(worst[graph.name], share(got, expected))
    return worst


def share(got: Any, expected: Any) -> float:
    """Return the largest relative difference; infinite for a NaN or a different shape."""
    if got.shape != expected.shape:
        return float("inf")
    difference = float(np.abs(got - expected).max() / max(1.0, np.abs(expected).max()))
    return difference if difference == difference else float("inf")


def compare_causal(module: Any, graphs: Sequence[Path]) -> dict[str, float]:
    """Return differences of logits with a cache, of logits with padding, and of logits with a paged cache."""
    import openvino
    import torch

    from conch.convert.causal.agreement import ServedGraph
    from conch.convert.causal.export import CausalNetwork

    ids = np.random.default_rng(7).integers(4, module.config.vocab_size, (2, TEXT))
    mask = np.ones_like(ids)
    padded = mask.copy()
    padded[1, :5] = 0
    network = CausalNetwork(module)
    settings = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": THREADS}
    compiled: Any = openvino.Core().compile_model(graphs[0], "CPU", settings)
    differences, parameters = {}, inspect.signature(module.forward).parameters
    for name, kept in (("cache", mask), ("padding", padded)):
        positions = np.maximum(0, kept.cumsum(1) - 1)
        request, cache, got, expected, start = (
            compiled.create_infer_request(),
            network.new_cache(),
            [],
            [],
            0,
        )
        for end in ENDS:
            now = {
                "input_ids": ids[:, start:end],
                "attention_mask": kept[:, :end],
                "position_ids": positions[:, start:end],
                "beam_idx": np.arange(2, dtype=np.int32),
            }
            with torch.inference_mode():
                tensors = {key: torch.from_numpy(array) for key, array in now.items() if key in parameters}
                expected.append(network.run(cache, **tensors).logits.float().numpy())
            outputs = request.infer({port.get_any_name(): now[port.get_any_name()] for port in compiled.inputs})
            got.append(np.array(outputs["logits"]))
            start = end
        differences[name] = share(np.concatenate(got, axis=1)[kept == 1], np.concatenate(expected, axis=1)[kept == 1])
    with torch.inference_mode():
        expected = module(input_ids=torch.from_numpy(ids), use_cache=False).logits.float().numpy()
    served = ServedGraph(graphs[0], "fp32", module.config.to_dict(), cache_tokens=512, threads=THREADS)
    differences["paged"] = share(served.logits(ids), expected)
    return differences


def cell(outcome: Outcome) -> str:
    if "differences" not in outcome:
        return str(outcome.get("refused") or outcome.get("absent", ""))
    wrong = {name: value for name, value in outcome["differences"].items() if not value <= SAME}
    if wrong:
        return "**wrong**: " + ", ".join(f"{name} {value:.1g}" for name, value in wrong.items())
    return f"{max(outcome['differences'].values()):.0e}"
