"""The exporters, each as one function from a checkpoint to graphs, and functions that run an encoder's graph.

Used by benchmarks.exporters in a process for each export.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.convert.libraries import describe_error

#: The number of threads of exports and graphs; __main__ sets it before torch is imported.
THREADS: Final = int(os.environ.get("OMP_NUM_THREADS", "2"))
Outcome = dict[str, Any]


def export(exporter: str, folder: Path, task: str, target: Path) -> list[Path]:
    """Write the fp32 graphs of the checkpoint in ``folder`` to ``target``; raises the exporter's errors."""
    if exporter == "conch":
        config = json.loads((folder / "config.json").read_text("utf-8"))
        longest = min(64, config.get("max_position_embeddings", 64))
        checkpoint = Checkpoint(folder, str(folder), "", config, Options(), task=task, max_length=longest)
        return list((conch_causal if task == "text-generation" else conch_encoder)(checkpoint, target))
    # optimum is imported by name, so that type checks do not depend on its installation.
    if exporter == "optimum-intel":
        task = "text-generation-with-past" if task == "text-generation" else task
        config = importlib.import_module("optimum.intel").OVConfig(dtype="fp32")
        main_export = importlib.import_module("optimum.exporters.openvino").main_export
        main_export(str(folder), target, task=task, library_name="transformers", ov_config=config)
        return [target / "openvino_model.xml"]
    main_export = importlib.import_module("optimum.exporters.onnx").main_export
    main_export(str(folder), target, task=task, library_name="transformers", do_validation=False)
    return [target / "model.onnx"]


def conch_encoder(checkpoint: Checkpoint, target: Path) -> Iterator[Path]:
    """Export ONNX plain and fused, and OpenVINO's IR if OpenVINO is installed."""
    from conch.convert.encoder import export, network
    from conch.convert.encoder.export import optimise

    loaded = network.load(checkpoint)
    export.export(loaded, target / "model.onnx")
    yield target / "model.onnx"
    optimise(target / "model.onnx", loaded, target / "fused.onnx")
    yield target / "fused.onnx"
    if importlib.util.find_spec("openvino"):
        export.convert_graph(target / "model.onnx", loaded, target / "model.xml")
        yield target / "model.xml"


def conch_causal(checkpoint: Checkpoint, target: Path) -> Iterator[Path]:
    from conch.convert.causal.conversion import write_weights
    from conch.convert.causal.export import export, load

    model = export(load(checkpoint))
    yield write_weights(model, target / "fp32", "fp32", [])


def runner(graph: Path) -> Callable[[dict[str, Any]], list[Any]]:
    """Return a function that runs an encoder's graph; it ignores inputs that the graph does not have."""
    if graph.suffix == ".onnx":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = THREADS, 4
        loaded = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        names = [port.name for port in loaded.get_inputs()]
        return lambda arrays: loaded.run(None, {name: arrays[name] for name in names})
    import openvino

    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": THREADS}
    compiled: Any = openvino.Core().compile_model(graph, "CPU", settings)
    names = [port.get_any_name() for port in compiled.inputs]
    return lambda arrays: list(compiled({name: arrays[name] for name in names}).values())


def inputs(config: Any, sequences: int, tokens: int) -> dict[str, Any]:
    """Return random tokens, with padding on the right of all sequences except the first, and random pixels."""
    draw, pad = np.random.default_rng(tokens), getattr(config, "pad_token_id", None) or 0
    mask = (np.arange(tokens) < np.maximum(1, tokens - 2 * np.arange(sequences))[:, None]).astype(np.int64)
    ids = draw.integers(4, getattr(config, "vocab_size", 99), mask.shape)
    pixels = draw.standard_normal((sequences, 3, 32, 32), np.float32)
    segments = (np.arange(tokens) > tokens // 2) * mask
    arrays = {"input_ids": np.where(mask == 1, ids, pad), "attention_mask": mask, "pixel_values": pixels}
    return {**arrays, "token_type_ids": segments if getattr(config, "type_vocab_size", 2) > 1 else 0 * segments}


def apart(function: Callable[..., Outcome], *arguments: Any, seconds: float = 300) -> Outcome:
    """Run a function in a separate process, because exporters patch modules and graphs may crash."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(False)

    def work() -> None:
        try:
            sender.send(function(*arguments))
        except BaseException as error:  # an exporter may raise any error, also SystemExit
            sender.send({"refused": "refused: " + describe_error(error)})

    child = context.Process(target=work)
    child.start()
    sender.close()
    outcome: Outcome = {"refused": f"no answer in {seconds:.0f} s"}
    if receiver.poll(seconds):
        outcome = {"refused": "**crash**"}
        with suppress(EOFError):
            outcome = receiver.recv()
    child.kill()
    child.join()
    return outcome
