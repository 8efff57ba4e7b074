"""The model repository of a simulation: model directories with files that control their simulated workers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.simulation.addresses import ADDRESSES

#: The description of a model, for its configuration and files; see :func:`config_of`.
ModelSpec = Mapping[str, Any]


class SimulatedRepository:
    """Writes model directories below ``path``; each change of a model's files has a new stamp."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp = 0
        #: The stamps of each model, oldest first.
        self.stamps: dict[str, list[int]] = {}

    def write(self, name: str, spec: ModelSpec) -> None:
        """Write the files of a model, or replace them."""
        self._stamp += 1
        self.stamps.setdefault(name, []).append(self._stamp)
        directory = self.path / name
        for version in spec.get("versions", (1,)):
            (directory / str(version)).mkdir(parents=True, exist_ok=True)
            if spec["kind"] != "ensemble":
                behaviour = {
                    "stamp": self._stamp,
                    "sequence": spec["kind"] == "sequence",
                    "decoupled": spec["kind"] == "decoupled",
                    "calls": spec.get("calls", ""),
                    "load_seconds": spec.get("load_seconds", 0),
                    "modules": spec.get("modules", []),
                    "metrics": spec.get("metrics", False),
                }
                self._replace(directory / str(version) / "model.py", json.dumps(behaviour))
        self._replace(directory / "config.pbtxt", config_of(name, spec))

    def _replace(self, path: Path, text: str) -> None:
        """Replace a file; its modification time depends on the stamp alone."""
        path.write_text(text)
        os.utime(path, (self._stamp, self._stamp))


def config_of(name: str, spec: ModelSpec) -> str:
    """Return the text of ``config.pbtxt``.

    ``kind`` is ``plain``, ``sequence``, ``decoupled``, ``bls`` or ``ensemble``, or ``remote``, ``remote_sequence`` or
    ``remote_decoupled`` for models that other servers run, over gRPC if ``grpc`` is set. ``calls`` is the name of the
    model that a BLS model calls, ``steps`` are the names of the models of an ensemble.
    """
    tensors = (
        'input { name: "IN" data_type: TYPE_INT64 dims: [3] }\noutput { name: "OUT" data_type: TYPE_INT64 dims: [3] }\n'
    )
    text = f'name: "{name}"\nmax_batch_size: {spec.get("batch", 4)}\n{tensors}'
    if spec.get("cache"):
        text += "response_cache { enable: true }\n"
    if spec["kind"] == "ensemble":
        return text + _ensemble_steps(spec["steps"])
    if spec["kind"].startswith("remote"):
        scheme = "grpc" if spec["grpc"] else "http"
        urls = ",".join(f"{scheme}://{host}:{port}" for host, port in ADDRESSES)
        text += f'backend: "remote"\nparameters {{ key: "url" value {{ string_value: "{urls}" }} }}\n'
        further = {
            "remote": "",
            "remote_sequence": "sequence_batching { }\n",
            "remote_decoupled": "model_transaction_policy { decoupled: true }\n",
        }
        return text + further[spec["kind"]]
    text += 'backend: "python"\n'
    limits = "".join(
        f'resources {{ name: "{key}" count: {count} }}' for key, count in spec.get("resources", {}).items()
    )
    text += f"instance_group {{ count: {spec.get('instances', 1)} kind: KIND_CPU rate_limiter {{ {limits} }} }}\n"
    if spec["kind"] == "decoupled":
        text += "model_transaction_policy { decoupled: true }\n"
    if spec["kind"] == "sequence":
        return text + _sequence_batching(spec)
    queue = f"default_queue_policy {{ max_queue_size: {spec.get('queue', 0)} }}"
    ordered = "preserve_ordering: true" if spec.get("ordered") else ""
    return text + (
        f"dynamic_batching {{ max_queue_delay_microseconds: {spec.get('delay_us', 0)} {ordered} {queue} }}\n"
        if spec.get("batch", 4)
        else ""
    )


def _sequence_batching(spec: ModelSpec) -> str:
    controls = "".join(
        f'control_input {{ name: "{name}" control {{ kind: {kind} int32_false_true: [0, 1] }} }} '
        for name, kind in (("START", "CONTROL_SEQUENCE_START"), ("READY", "CONTROL_SEQUENCE_READY"))
    )
    idle = f"max_sequence_idle_microseconds: {spec.get('idle_us', 60_000_000)}"
    if spec.get("oldest"):
        return f"sequence_batching {{ {idle} oldest {{ max_candidate_sequences: 3 }} {controls} }}\n"
    return f"sequence_batching {{ {idle} direct {{ }} {controls} }}\n"


def _ensemble_steps(steps: list[str]) -> str:
    lines = []
    for at, step in enumerate(steps):
        before = "IN" if at == 0 else f"T{at}"
        after = "OUT" if at == len(steps) - 1 else f"T{at + 1}"
        lines.append(
            f'step {{ model_name: "{step}" model_version: -1 input_map {{ key: "IN" value: "{before}" }} '
            f'output_map {{ key: "OUT" value: "{after}" }} }}'
        )
    return 'platform: "ensemble"\nensemble_scheduling { ' + "\n".join(lines) + " }\n"
