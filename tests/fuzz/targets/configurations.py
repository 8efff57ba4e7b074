"""``config.pbtxt``, a configuration as JSON, and what is made of either before anything is loaded."""

from __future__ import annotations

import contextlib
from typing import Final

from conch.config import render
from conch.config.complete import complete
from conch.config.effects import ineffective_problems
from conch.config.pbtxt import parse
from conch.config.schema import ModelConfig
from conch.config.validate import validate
from conch.core.errors import ConchError
from tests.fuzz.target import target

_TEXT: Final = b"""name: "m" backend: "python" max_batch_size: 4
input [{ name: "x" data_type: TYPE_FP32 dims: [ -1, 2 ] reshape { shape: [ -1 ] } optional: true }]
output [{ name: "y" data_type: TYPE_STRING dims: 1 label_filename: "labels.txt" }]
instance_group [{ count: 2 kind: KIND_CPU }]
dynamic_batching { preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 100 priority_levels: 2
  default_queue_policy { timeout_action: REJECT max_queue_size: 10 } }
version_policy { specific { versions: [1, 3] } }
parameters { key: "a" value { string_value: "b" } }
model_warmup [{ name: "w" batch_size: 1 inputs { key: "x" value { data_type: TYPE_FP32 dims: 2 zero_data: true } } }]
"""
_ENSEMBLE: Final = b"""platform: "ensemble" input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
ensemble_scheduling { step [{ model_name: "a" model_version: -1 input_map { key: "x" value: "x" }
  output_map { key: "y" value: "y" } }] }
"""
_TOKENS: Final = (
    b"dims", b"TYPE_INT64", b"data_type:", b"{", b"}", b"[", b"]", b":", b'"', b"#", b"\\x00", b"KIND_GPU", b"count:",
    b"sequence_batching {", b"oldest {", b"model_warmup", b"optimization", b"999999999999999999999", b"input {",
    b"<", b">",
)  # fmt: skip


@target(seeds=[_TEXT, _ENSEMBLE], tokens=_TOKENS)
def config_pbtxt(data: bytes) -> None:
    with contextlib.suppress(ConchError):
        _use(parse(data.decode("utf-8", "replace"), "config.pbtxt"))


@target(seeds=[render.to_json(parse(text.decode(), "seed")).encode() for text in (_TEXT, _ENSEMBLE)], tokens=_TOKENS)
def config_json(data: bytes) -> None:
    with contextlib.suppress(ConchError):
        _use(render.from_json(data.decode("utf-8", "replace")))


def _use(config: ModelConfig) -> None:
    completed = complete(config, config.name or "m", ["model.py"], gpus=[0])
    validate(completed)
    list(ineffective_problems(completed))
    assert render.from_json(render.to_json(completed)) == completed
