"""The models of the soak, each with an answer that can be checked."""

from __future__ import annotations

from pathlib import Path

from transformers import LlamaConfig

from tests import text_checkpoints
from tests.checkpoints import train_tokenizer, write_checkpoint
from tests.models import build, write

_ECHO = '''"""Answers TEXT with TEXT, behind the mark of this version of the file."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
            marked = np.array([[b"MARK " + text for text in row] for row in texts], object)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("ANSWER", marked)]))
        return responses
'''
_ECHO_CONFIG = """backend: "python"
max_batch_size: 16
input { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "ANSWER" data_type: TYPE_STRING dims: [ 1 ] }
dynamic_batching { default_queue_policy { max_queue_size: 256 } }
instance_group { kind: KIND_CPU count: 2 }
"""
_TWICE_CONFIG = """platform: "ensemble"
max_batch_size: 16
input { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "ANSWER" data_type: TYPE_STRING dims: [ 1 ] }
ensemble_scheduling {
  step { model_name: "echo" model_version: -1 input_map { key: "TEXT" value: "TEXT" }
         output_map { key: "ANSWER" value: "once" } }
  step { model_name: "other" model_version: -1 input_map { key: "TEXT" value: "once" }
         output_map { key: "ANSWER" value: "ANSWER" } }
}
"""
#: How the marks of the versions of a model that is replaced begin; a number follows.
MARK = "mark"


def write_repository(folder: Path) -> Path:
    """``echo``, ``other`` and ``twice``, which asks both; ``repeat``, decoupled; ``encoder`` and ``writer``.

    ``spare`` is loaded and unloaded all the time.
    """
    for name in ("echo", "other", "spare"):
        write(folder, name, _ECHO_CONFIG, {"1/model.py": echo_file(0)})
    (write(folder, "twice", _TWICE_CONFIG) / "1").mkdir()
    build(folder, "repeat")
    text_checkpoints.write(folder / "encoder" / "1", "AutoModel")
    sizes = {"intermediate_size": 64, "max_position_embeddings": 512}
    write_checkpoint(folder / "writer" / "1", LlamaConfig, sizes, train_tokenizer(every_byte=True), seed=5)
    return folder


def echo_file(number: int) -> str:
    """The ``model.py`` of an echo whose answers begin with ``mark<number>``."""
    return _ECHO.replace("MARK", f"{MARK}{number}")


def replace_echo(folder: Path, name: str, number: int) -> None:
    """Give a model another ``model.py``, whole at every moment."""
    target = folder / name / "1" / "model.py"
    new = target.with_suffix(".new")
    new.write_text(echo_file(number))
    new.replace(target)
