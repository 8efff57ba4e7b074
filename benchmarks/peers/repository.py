"""The model repository of the peers on the real Triton."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from benchmarks.texts import checkpoint

_SOURCES: Final = Path(__file__).with_name("models")
_TEXT: Final = 'input [{name: "TEXT" data_type: TYPE_STRING dims: [1]}]\n'
_EMBEDDING: Final = 'output [{name: "EMBEDDING" data_type: TYPE_FP32 dims: [384]}]\n'
_MODEL: Final = 'backend: "python"\nmax_batch_size: %d\n%s%sdynamic_batching { }\n%s'
_INSTANCE: Final = "instance_group [{kind: KIND_CPU count: 1}]\n"
#: Requests of different lengths share a batch, and the model pads them.
_IDS: Final = 'input [{name: "input_ids" data_type: TYPE_INT64 dims: [-1] allow_ragged_batch: true}]\n'
_ENSEMBLE: Final = """platform: "ensemble"
max_batch_size: %d
%s%sensemble_scheduling { step [
  {model_name: "%s" model_version: -1
   input_map {key: "TEXT" value: "TEXT"} output_map {key: "input_ids" value: "ids"}},
  {model_name: "%s" model_version: -1
   input_map {key: "input_ids" value: "ids"} output_map {key: "EMBEDDING" value: "EMBEDDING"}}
] }
"""


def write(repository: Path, max_batch: int, *, with_transformers: bool, graphs: dict[str, Path]) -> None:
    """Write ``transformers``, and for each of ``graphs`` an ensemble of that name, its tokenizer and its model."""
    folder = _parameter("checkpoint", checkpoint())
    if with_transformers:
        config = _MODEL % (max_batch, _TEXT, _EMBEDDING, folder)
        _model(repository / "transformers", config + _INSTANCE, "transformers_model.py")
    for name, graph in graphs.items():
        ids = 'output [{name: "input_ids" data_type: TYPE_INT64 dims: [-1]}]\n'
        tokenizer, model = f"{name}_tokenizer", f"{name}_model"
        _model(repository / tokenizer, _MODEL % (max_batch, _TEXT, ids, folder) + _INSTANCE, "tokenizer_model.py")
        config = _MODEL % (max_batch, _IDS, _EMBEDDING, _parameter("graph", graph))
        _model(repository / model, config + _INSTANCE, "onnx_model.py")
        (repository / name / "1").mkdir(parents=True)
        ensemble = _ENSEMBLE % (max_batch, _TEXT, _EMBEDDING, tokenizer, model)
        (repository / name / "config.pbtxt").write_text(ensemble)


def _model(directory: Path, config: str, source: str) -> None:
    (directory / "1").mkdir(parents=True)
    shutil.copyfile(_SOURCES / source, directory / "1" / "model.py")
    (directory / "config.pbtxt").write_text(config)


def _parameter(name: str, value: Path) -> str:
    return f'parameters [{{key: "{name}" value: {{string_value: "{value}"}}}}]\n'
