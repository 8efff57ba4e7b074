"""Configurations at the limits of each rule for tensors, batches and ensembles, and Triton's error messages.

The messages are in ``rules.json``, recorded from Triton 2.51 by ``python -m tests.conformance.rules``; an empty text
means that Triton loads the model. A rule that is checked when the repository is read appears only in Triton's log.
Messages are recorded twice: with auto-completion by the backends; and without it for models without a version, where
only valid configurations are refused for the missing version.
"""

# ruff: noqa: E501  (one configuration a line)
from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

from tests.conformance.raw import Request, send
from tests.models import write
from tests.oracle import TritonServer

PASS = """
class TritonPythonModel:
    def execute(self, requests):
        return []
"""
A = 'input { name: "A" data_type: TYPE_FP32 dims: 4 } '
B = 'output { name: "B" data_type: TYPE_FP32 dims: 4 } '
B2 = B.replace('"B"', '"B2"')
TWO = "max_batch_size: 2 "
KINDS = (
    "BATCH_ELEMENT_COUNT", "BATCH_ACCUMULATED_ELEMENT_COUNT", "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", "BATCH_ITEM_SHAPE", "BATCH_ITEM_SHAPE_FLATTEN",
)  # fmt: skip
#: The fields after the name and the type of a tensor.
SHAPES = {
    "no dims": "",
    "dim 0": "dims: [ 4, 0 ]",
    "dim -2": "dims: -2",
    "reshape 0": "dims: 4 reshape { shape: [ 4, 0 ] }",
    "reshape -2": "dims: 4 reshape { shape: -2 }",
    "reshape empty": "dims: 1 reshape { }",
    "reshape empty of two": "dims: 2 reshape { }",
    "reshape of another size": "dims: [ 2, 3 ] reshape { shape: [ 2, 2 ] }",
    "reshape of the same size": "dims: [ 2, 3 ] reshape { shape: 6 }",
    "reshape without variable": "dims: [ -1, 2 ] reshape { shape: 2 }",
    "reshape with variable": "dims: 2 reshape { shape: [ -1, 2 ] }",
    "reshape of fewer variables": "dims: [ -1, -1 ] reshape { shape: -1 }",
    "reshape across a variable": "dims: [ 4, -1, 3 ] reshape { shape: [ 3, -1, 4 ] }",
    "reshape beside a variable": "dims: [ 4, -1, 3 ] reshape { shape: [ 2, 2, -1, 3, 1 ] }",
    "reshape more variables": "dims: [ -1, 2 ] reshape { shape: [ -1, -1 ] }",
    "no reshape": "dims: [ -1, 7 ]",
}


def _model(text: str) -> str:
    return f'backend: "python" {text}'


def _batch_input(text: str) -> str:
    return _model(f"{TWO}{A}{B}batch_input {{ {text} }}")


def _batch_output(text: str) -> str:
    return _model(f"{TWO}{A}{B}{text}")


def _step(model: str, inputs: str, outputs: str) -> str:
    """Return a step of ``model``; the maps are pairs such as ``A:X``."""
    maps = [
        (kind, *pair.split(":")) for kind, pairs in (("input", inputs), ("output", outputs)) for pair in pairs.split()
    ]
    return f'step {{ model_name: "{model}" model_version: -1 ' + " ".join(
        f'{kind}_map {{ key: "{key}" value: "{value}" }}' for kind, key, value in maps
    ) + " }"  # fmt: skip


def _ensemble(*steps: str, tensors: str = A + B, more: str = "") -> str:
    return f'platform: "ensemble" {tensors}{more} ensemble_scheduling {{ {" ".join(steps)} }}'


#: The models that the ensembles use.
MEMBERS = {
    "ok": _model(A + B),
    "wide": _model(A.replace("4", "8") + B.replace("4", "8")),
    "whole": _model(A.replace("FP32", "INT32") + B),
    "join": _model(A + A.replace('"A"', '"A2"') + B),
    "either": _model(A + A.replace('dims', 'optional: true dims').replace('"A"', '"A2"') + B),
    "stream": _model(A + B + "model_transaction_policy { decoupled: true }"),
    "two": _model(TWO + A + B),
    "open": _model(A.replace("4", "-1") + B.replace("4", "-1")),
}  # fmt: skip
ONE = _step("ok", "A:A", "B:B")

RULES: dict[str, str] = {
    **{f"input, {name}": _model(f'input {{ name: "A" data_type: TYPE_FP32 {text} }} {B}') for name, text in SHAPES.items()},
    **{f"output, {name}": _model(f'{A} output {{ name: "B" data_type: TYPE_FP32 {text} }}') for name, text in SHAPES.items()},
    **{f"batched, {name}": _model(f'{TWO}input {{ name: "A" data_type: TYPE_FP32 {SHAPES[name]} }} {B}') for name in ("reshape empty", "reshape empty of two")},
    "input without name": _model("input { data_type: TYPE_FP32 dims: 1 } " + B),
    "input without type": _model('input { name: "A" dims: 1 } ' + B),
    "input without anything": _model("input { } " + B),
    "output without name": _model(A + "output { data_type: TYPE_FP32 dims: 1 }"),
    "output without type": _model(A + 'output { name: "B" dims: 1 }'),
    "input and output wrong": _model('input { name: "A" data_type: TYPE_FP32 dims: 0 } output { dims: 0 }'),
    "format of two": _model('input { name: "A" data_type: TYPE_FP32 dims: [ 2, 2 ] format: FORMAT_NHWC } ' + B),
    "format of three": _model('input { name: "A" data_type: TYPE_FP32 dims: [ 2, 2, 3 ] format: FORMAT_NCHW } ' + B),
    "shape tensor": _model(A + 'output { name: "B" data_type: TYPE_FP32 dims: 4 is_shape_tensor: true }'),
    "non-linear format": _model('input { name: "A" data_type: TYPE_FP32 dims: 4 is_non_linear_format_io: true } ' + B),
    "ragged": _model(TWO + 'input { name: "A" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true } ' + B),
    **{f"{kind} without source": _batch_input(f'kind: {kind} target_name: "T" data_type: TYPE_FP32') for kind in KINDS},
    **{f"{kind} of two sources": _batch_input(f'kind: {kind} target_name: "T" data_type: TYPE_FP32 source_input: [ "A", "A" ]') for kind in KINDS},
    **{f"{kind} of one source": _batch_input(f'kind: {kind} target_name: "T" data_type: TYPE_INT32 source_input: "A"') for kind in KINDS},
    "batch input of another type": _batch_input('target_name: "T" data_type: TYPE_INT64 source_input: "A"'),
    "batch input without type": _batch_input('target_name: "T" source_input: "A"'),
    "batch input of an unknown source": _batch_input('target_name: "T" data_type: TYPE_FP32 source_input: "Z"'),
    "batch input of an output": _batch_input('target_name: "T" data_type: TYPE_FP32 source_input: "B"'),
    "batch input wrong in all": _batch_input('target_name: "T" data_type: TYPE_INT64 source_input: [ "Z", "Z" ]'),
    "batch input without target": _batch_input('data_type: TYPE_FP32 source_input: "A"'),
    "batch input twice": _model(TWO + A + B + 2 * 'batch_input { target_name: "T" data_type: TYPE_FP32 source_input: "A" } '),
    "batch input of a model that does not batch": _model(A + B + 'batch_input { target_name: "T" data_type: TYPE_FP32 source_input: "A" }'),
    "batch output without source": _batch_output('batch_output { target_name: "B" }'),
    "batch output of two sources": _batch_output('batch_output { target_name: "B" source_input: [ "A", "A" ] }'),
    "batch output of an unknown source": _batch_output('batch_output { target_name: "B" source_input: "Z" }'),
    "batch output to an unknown target": _batch_output('batch_output { target_name: "Z" source_input: "A" }'),
    "batch output twice to a target": _batch_output('batch_output { target_name: [ "B", "B" ] source_input: "A" }'),
    "two batch outputs to a target": _batch_output(2 * 'batch_output { target_name: "B" source_input: "A" } '),
    "batch output without target": _batch_output('batch_output { source_input: "A" }'),
    "batch output wrong in all": _batch_output('batch_output { target_name: "Z" source_input: [ "Z", "Z" ] }'),
    "batch output": _batch_output('batch_output { target_name: "B" source_input: "A" }'),
    "preferred size 0": _model(TWO + A + B + "dynamic_batching { preferred_batch_size: 0 }"),
    "preferred size too large": _model(TWO + A + B + "dynamic_batching { preferred_batch_size: [ 1, 3 ] }"),
    "default level without levels": _model(TWO + A + B + "dynamic_batching { default_priority_level: 2 }"),
    "default level beyond levels": _model(TWO + A + B + "dynamic_batching { priority_levels: 2 default_priority_level: 3 }"),
    "no default level": _model(TWO + A + B + "dynamic_batching { priority_levels: 2 }"),
    "policy of level 0": _model(TWO + A + B + "dynamic_batching { priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 0 value { } } }"),
    "policy beyond levels": _model(TWO + A + B + "dynamic_batching { priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 3 value { } } }"),
    "policy without levels": _model(TWO + A + B + "dynamic_batching { priority_queue_policy { key: 3 value { } } }"),
    "order and levels": _model(TWO + A + B + "dynamic_batching { preserve_ordering: true priority_levels: 2 default_priority_level: 1 }"),
    "order and delay": _model(TWO + A + B + "dynamic_batching { preserve_ordering: true default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 1 } }"),
    "order and delay without timeout": _model(TWO + A + B + "dynamic_batching { preserve_ordering: true default_queue_policy { timeout_action: DELAY } }"),
    "ensemble": _ensemble(_step("ok", "A:A", "B:X"), _step("ok", "A:X", "B:B")),
    "ensemble without scheduling": 'platform: "ensemble" ' + A + B,
    "ensemble scheduling elsewhere": _model(A + B + f"ensemble_scheduling {{ {ONE} }}"),
    "ensemble with backend": _ensemble(ONE, more='backend: "python"'),
    "ensemble with instances": _ensemble(ONE, more="instance_group { count: 1 }"),
    "ensemble with optimization": _ensemble(ONE, more="optimization { }"),
    "ensemble with warmup": _ensemble(ONE, more='model_warmup { name: "w" }'),
    "ensemble without steps": _ensemble(),
    "ensemble without model name": _ensemble(_step("", "A:A", "B:B")),
    "ensemble without input map": _ensemble(_step("ok", "", "B:B")),
    "ensemble without output map": _ensemble(_step("ok", "A:A", "")),
    "ensemble tensor written twice": _ensemble(ONE, ONE),
    "ensemble tensor written twice by a step": _ensemble(_step("ok", "A:A", "B:B C:B")),
    "ensemble input unused": _ensemble(ONE, tensors=A + B + A.replace('"A"', '"A2"')),
    "ensemble output unused": _ensemble(ONE, tensors=A + B + B.replace('"B"', '"B2"')),
    "ensemble output not written": _ensemble(_step("ok", "A:A B:X", "B:Y")),
    "ensemble output not connected": _ensemble(_step("ok", "A:A", "B:X"), _step("ok", "A:X", "B:Z"), _step("ok", "A:Y", "B:B")),
    "ensemble tensor unused": _ensemble(_step("ok", "A:A", "B:X"), ONE),
    "ensemble of itself": _ensemble(_step("ensemble_of_itself", "A:A", "B:B")),
    "ensemble of an absent model": _ensemble(_step("absent", "A:A", "B:B")),
    "ensemble of two absent models": _ensemble(_step("zz", "A:A", "B:X"), _step("aa", "A:X", "B:B")),
    "ensemble of a version that is absent": _ensemble(ONE.replace("-1", "7")),
    "ensemble with larger batches": _ensemble(_step("two", "A:A", "B:B"), more="max_batch_size: 4"),
    "ensemble with a wrong input": _ensemble(_step("ok", "Z:A", "B:B")),
    "ensemble with a wrong output": _ensemble(_step("ok", "A:A", "Z:B")),
    "ensemble with an input less": _ensemble(_step("join", "A:A", "B:B")),
    "ensemble with an optional input less": _ensemble(_step("either", "A:A", "B:B")),
    "ensemble with another type": _ensemble(_step("whole", "A:A", "B:B")),
    "ensemble with another shape": _ensemble(_step("wide", "A:A", "B:B")),
    "ensemble with another shape of batches": _ensemble(_step("two", "A:A", "B:B"), tensors=A.replace("4", "8") + B, more=TWO),
    "ensemble with another shape between": _ensemble(_step("open", "A:A", "B:X"), _step("wide", "A:X", "B:Y"), _step("ok", "A:Y", "B:B")),
    "ensemble with a tensor for two inputs": _ensemble(_step("join", "A:A A2:A", "B:B")),
    "ensemble joins two streams": _ensemble(_step("stream", "A:A", "B:X"), _step("stream", "A:A", "B:Y"), _step("join", "A:X A2:Y", "B:B")),
    "ensemble joins a stream with its input": _ensemble(_step("stream", "A:A", "B:X"), _step("join", "A:X A2:A", "B:B")),
    "ensemble joins a stream with another step": _ensemble(_step("stream", "A:A", "B:X"), _step("ok", "A:A", "B:Y"), _step("join", "A:X A2:Y", "B:B")),
    "ensemble joins a stream with what comes of it": _ensemble(_step("stream", "A:A", "B:X"), _step("ok", "A:X", "B:Y"), _step("join", "A:X A2:Y", "B:B")),
    "ensemble joins two streams inside": _ensemble(_step("stream", "A:A", "B:X"), _step("stream", "A:A", "B:Y"), _step("join", "A:X A2:Y", "B:Z"), _step("ok", "A:Z", "B:B")),
    "ensemble gives two streams": _ensemble(_step("stream", "A:A", "B:B"), _step("stream", "A:A", "B:B2"), tensors=A + B + B2),
    "ensemble gives a stream and another step": _ensemble(_step("stream", "A:A", "B:B"), _step("ok", "A:A", "B:B2"), tensors=A + B + B2),
    "ensemble gives a stream and what comes of it": _ensemble(_step("stream", "A:A", "B:B2"), _step("ok", "A:B2", "B:B"), tensors=A + B + B2),
    "ensemble gives a stream and a stream of it": _ensemble(_step("stream", "A:A", "B:B2"), _step("stream", "A:B2", "B:B"), tensors=A + B + B2),
    "ensemble gives a stream and its input": _ensemble(_step("stream", "A:A", "B:B"), tensors=A + B + A.replace("input", "output")),
    "name of another model and a wrong batch size": _model(A + B + 'name: "other" max_batch_size: -1'),
    "name of another model and a wrong tensor": _model('name: "other" input { name: "A" } ' + B),
    "name of another model without backend": 'name: "other" ' + A + B,
    "name of another model without scheduling": 'name: "other" platform: "ensemble" ' + A + B,
    "name of another model": _model(A + B + 'name: "other"'),
}  # fmt: skip
#: Recorded in place of a message if the server crashed.
CRASHES = "Triton does not survive this"
#: Recorded in place of the refusal of a model without a version.
NO_VERSION = "it has no version"
RECORDED = Path(__file__).with_suffix(".json")


def name_of(rule: str) -> str:
    """Return the name of a rule's model."""
    return re.sub(r"\W+", "_", rule)


def lay_out(repository: Path, *, versions: bool = True) -> None:
    """Write all models, with or without versions; their code does not read their configuration."""
    for name, config in {**MEMBERS, **{name_of(rule): config for rule, config in RULES.items()}}.items():
        files = {"1/.keep": ""} if "platform" in config else {"1/model.py": PASS}
        write(repository, name, config, files if versions or name in MEMBERS else {"notes.txt": ""})


def record(folder: Path, *flags: str, versions: bool = True) -> dict[str, str]:
    """Return Triton's message for each rule; after a crash it is restarted."""
    lay_out(folder / "models", versions=versions)
    told: dict[str, str] = {}
    log = folder / "log"
    while waiting := [rule for rule in RULES if rule not in told]:
        with TritonServer(folder / "models", "--model-control-mode=explicit", *flags, log=log) as triton:
            for rule in waiting:
                try:
                    path = f"/v2/repository/models/{name_of(rule)}/load"
                    reply = send(triton.http, Request("POST", path, b""), timeout=30)
                except OSError:
                    told[rule] = CRASHES
                    break
                told[rule] = _rule(reply.error, name_of(rule), log.read_text()) if reply.body else ""
    return {rule: told[rule] for rule in RULES}


def _rule(error: str, model: str, log: str) -> str:
    if "failed to poll" in error:
        found = re.findall(rf"Poll failed for model directory '{model}': (.*?)\"?\n", log)
        return found[-1] if found else error
    if "at least one version must be available" in error:
        return NO_VERSION
    error = error.removeprefix(f"load failed for model '{model}': ")
    return (
        error.removeprefix("version 1 is at UNAVAILABLE state: Invalid argument: ").removesuffix(";\n").rstrip("; \n")
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        recorded = {
            "completed": record(folder / "completed"),
            "as written": record(folder / "written", "--disable-auto-complete-config", versions=False),
        }
        RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")
