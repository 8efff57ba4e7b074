"""The model repository of Triton's Hugging Face tutorial: one text model, dynamic batching."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

_SOURCE: Final = Path(__file__).with_name("models") / "pipeline_model.py"
_CONFIG: Final = """backend: "python"
max_batch_size: %d
input [
  {name: "text_input" data_type: TYPE_STRING dims: [1]},
  {name: "max_tokens" data_type: TYPE_INT32 dims: [1]}
]
output [{name: "text" data_type: TYPE_STRING dims: [1]}]
dynamic_batching { }
instance_group [{kind: KIND_CPU count: 1}]
parameters [{key: "huggingface_model" value: {string_value: "%s"}}]
"""


def write(repository: Path, name: str, checkpoint: Path, max_batch: int) -> None:
    """Write the model ``name``, which serves the folder ``checkpoint``."""
    directory = repository / name
    (directory / "1").mkdir(parents=True)
    shutil.copyfile(_SOURCE, directory / "1" / "model.py")
    (directory / "config.pbtxt").write_text(_CONFIG % (max_batch, checkpoint))
