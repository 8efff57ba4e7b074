"""Models that do not load, or that load despite faults: configurations and files by name.

The expected responses to loads are in ``broken_models.json``, recorded from Triton 2.51 by
``python -m tests.conformance.broken_models``; ``OURS`` lists the cases in which conch responds differently.
"""

# ruff: noqa: E501  (one case a line)
from __future__ import annotations

import json
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tests.conformance.raw import Request, send
from tests.models import build, write
from tests.oracle import TritonServer

PASS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return []
"""
IO = """
input { name: "I" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "O" data_type: TYPE_FP32 dims: [ 4 ] }
"""
PYTHON = 'backend: "python"\n'
OUT = 'output { name: "O" data_type: TYPE_FP32 dims: [ 4 ] }\n'


@dataclass(frozen=True)
class Broken:
    """One model that does not load."""

    config: str | None
    files: dict[str, str] = field(default_factory=lambda: {"1/model.py": PASS})


def io(line: str) -> Broken:
    return Broken(PYTHON + line + OUT)


def with_config(text: str) -> Broken:
    return Broken(PYTHON + IO + text)


def python(body: str, config: str | None = PYTHON + IO) -> Broken:
    return Broken(config, {"1/model.py": body})


def completing(body: str, config: str = PYTHON) -> Broken:
    lines = "\n".join("        " + line for line in body.splitlines())
    return python(
        "class TritonPythonModel:\n    @staticmethod\n    def auto_complete_config(config):\n"
        f"{lines}\n    def execute(self, requests):\n        return []\n",
        config,
    )


def sequence(text: str) -> Broken:
    return Broken(PYTHON + "max_batch_size: 4\n" + IO + "sequence_batching { " + text + " }")


def step(model: str, inputs: str, outputs: str) -> str:
    maps = "".join(f'input_map {{ key: "{k}" value: "{v}" }} ' for k, v in (p.split(":") for p in inputs.split()))
    maps += "".join(f'output_map {{ key: "{k}" value: "{v}" }} ' for k, v in (p.split(":") for p in outputs.split()))
    return f'step {{ model_name: "{model}" model_version: -1 {maps}}}\n'


def ensemble(*steps: str, io: str = IO, extra: str = "") -> Broken:
    text = f'platform: "ensemble"\n{io}{extra}\nensemble_scheduling {{ {" ".join(steps)} }}'
    return Broken(text, {"1/.keep": ""})


BROKEN: dict[str, Broken] = {
    "not_text_format": Broken("this is { not a config"),
    "unknown_field": Broken(PYTHON + IO + "no_such_field: 1"),
    "wrong_type_of_field": Broken(PYTHON + IO + 'max_batch_size: "four"'),
    "other_name": Broken('name: "something_else"\n' + PYTHON + IO),
    "no_version": Broken(PYTHON + IO, {"notes.txt": ""}),
    "only_a_bad_version": Broken(PYTHON + IO, {"one/model.py": PASS}),
    "version_with_zero": Broken(PYTHON + IO, {"01/model.py": PASS}),
    "no_model_file": Broken(PYTHON + IO, {"1/other.py": PASS}),
    "no_backend": Broken(IO, {"1/other.txt": ""}),
    "no_such_backend": Broken('backend: "absent"' + IO),
    "negative_batch": with_config("max_batch_size: -1"),
    "other_filename": with_config('default_model_filename: "absent.py"'),
    "input_without_name": io("input { data_type: TYPE_FP32 dims: [ 4 ] }"),
    "input_without_type": io('input { name: "I" dims: [ 4 ] }'),
    "input_without_dims": io('input { name: "I" data_type: TYPE_FP32 }'),
    "input_dim_zero": io('input { name: "I" data_type: TYPE_FP32 dims: [ 0 ] }'),
    "input_dim_negative": io('input { name: "I" data_type: TYPE_FP32 dims: [ -2 ] }'),
    "input_reshape_empty": io('input { name: "I" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } }'),
    "input_reshape_size": io('input { name: "I" data_type: TYPE_FP32 dims: [ 4 ] reshape { shape: [ 3 ] } }'),
    "input_reshape_variable": io('input { name: "I" data_type: TYPE_FP32 dims: [ -1, 4 ] reshape { shape: [ 4 ] } }'),
    "input_reshape_zero": io('input { name: "I" data_type: TYPE_FP32 dims: [ 4 ] reshape { shape: [ 0 ] } }'),
    "input_shape_tensor": io('input { name: "I" data_type: TYPE_INT32 dims: [ 4 ] is_shape_tensor: true }'),
    "input_format": io('input { name: "I" data_type: TYPE_INT32 dims: [ 4 ] format: FORMAT_NCHW }'),
    "inputs_of_one_name": io(
        'input { name: "I" data_type: TYPE_INT32 dims: [ 4 ] }\ninput { name: "I" data_type: TYPE_INT32 dims: [ 4 ] }\n'
    ),
    "output_without_name": Broken(PYTHON + "output { data_type: TYPE_FP32 dims: [ 4 ] }\n"),
    "platform_unknown": Broken('platform: "nothing"' + IO),
    "platform_and_backend": Broken('platform: "onnxruntime_onnx"\n' + PYTHON + IO),
    "ensemble_with_backend": Broken('platform: "ensemble"\n' + PYTHON + IO),
    "dynamic_preferred_zero": with_config("max_batch_size: 4\ndynamic_batching { preferred_batch_size: [ 0 ] }"),
    "dynamic_preferred_large": with_config("max_batch_size: 4\ndynamic_batching { preferred_batch_size: [ 8 ] }"),
    "dynamic_default_level": with_config("max_batch_size: 4\ndynamic_batching { priority_levels: 2 default_priority_level: 3 }"),
    "dynamic_no_default_level": with_config("max_batch_size: 4\ndynamic_batching { priority_levels: 2 }"),
    "dynamic_policy_level": with_config(
        "max_batch_size: 4\ndynamic_batching { priority_levels: 2 default_priority_level: 1 "
        "priority_queue_policy { key: 3 value { max_queue_size: 1 } } }"
    ),
    "dynamic_ordering_levels": with_config(
        "max_batch_size: 4\ndynamic_batching { priority_levels: 2 default_priority_level: 1 preserve_ordering: true }"
    ),
    "dynamic_ordering_delay": with_config(
        "max_batch_size: 4\ndynamic_batching { preserve_ordering: true default_queue_policy { timeout_action: DELAY } }"
    ),
    "sequence_no_name": sequence("control_input { control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }"),
    "sequence_no_values": sequence('control_input { name: "C" control { kind: CONTROL_SEQUENCE_START } }'),
    "sequence_three_values": sequence('control_input { name: "C" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1, 2 ] } }'),
    "sequence_two_kinds_of_values": sequence(
        'control_input { name: "C" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] fp32_false_true: [ 0, 1 ] } }'
    ),
    "sequence_two_starts": sequence(
        'control_input { name: "C" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } } '
        'control_input { name: "D" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }'
    ),
    "sequence_one_tensor_twice": sequence(
        'control_input { name: "C" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } } '
        'control_input { name: "C" control { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } }'
    ),
    "sequence_corrid_values": sequence('control_input { name: "C" control { kind: CONTROL_SEQUENCE_CORRID int32_false_true: [ 0, 1 ] } }'),
    "sequence_corrid_type": sequence('control_input { name: "C" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32 } }'),
    "sequence_preferred": sequence("oldest { max_candidate_sequences: 4 preferred_batch_size: [ 8 ] }"),
    "sequence_preferred_zero": sequence("oldest { max_candidate_sequences: 4 preferred_batch_size: [ 0 ] }"),
    "sequence_utilization": sequence("direct { minimum_slot_utilization: 1.5 }"),
    "sequence_state_twice": sequence(
        'state { input_name: "S" output_name: "T" data_type: TYPE_INT32 dims: [ 1 ] } '
        'state { input_name: "S" output_name: "U" data_type: TYPE_INT32 dims: [ 1 ] }'
    ),
    "sequence_state_type": sequence(
        'state { input_name: "S" output_name: "T" data_type: TYPE_INT32 dims: [ 1 ] '
        'initial_state { name: "z" data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } }'
    ),
    "sequence_state_nameless": sequence(
        'state { input_name: "S" output_name: "T" data_type: TYPE_INT32 dims: [ 1 ] '
        "initial_state { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } }"
    ),
    "sequence_state_variable": sequence(
        'state { input_name: "S" output_name: "T" data_type: TYPE_INT32 dims: [ -1 ] '
        'initial_state { name: "z" data_type: TYPE_INT32 dims: [ -1 ] zero_data: true } }'
    ),
    "cache_and_sequence": Broken(PYTHON + "max_batch_size: 4\n" + IO + "sequence_batching { }\nresponse_cache { enable: true }"),
    "cache_and_decoupled": with_config("model_transaction_policy { decoupled: true }\nresponse_cache { enable: true }"),
    "group_cpu_with_gpus": with_config("instance_group [ { kind: KIND_CPU gpus: [ 0 ] } ]"),
    "group_model_with_gpus": with_config("instance_group [ { kind: KIND_MODEL gpus: [ 0 ] } ]"),
    "group_gpu_without": with_config("instance_group [ { kind: KIND_GPU } ]"),
    "group_with_profile": with_config('instance_group [ { kind: KIND_CPU profile: [ "a" ] } ]'),
    "warmup_variable": Broken(
        PYTHON + 'input { name: "I" data_type: TYPE_FP32 dims: [ -1 ] }\n' + OUT
        + 'model_warmup { name: "w" batch_size: 1 inputs { key: "I" value { data_type: TYPE_FP32 dims: [ -1 ] zero_data: true } } }'
    ),
    "warmup_file_short": Broken(
        PYTHON + IO + 'model_warmup { name: "w" batch_size: 1 inputs { key: "I" value { data_type: TYPE_FP32 dims: [ 4 ] input_data_file: "w" } } }',
        {"1/model.py": PASS, "warmup/w": "short"},
    ),
    "warmup_fails": with_config(
        'model_warmup { name: "w" batch_size: 1 inputs { key: "I" value { data_type: TYPE_FP32 dims: [ 4 ] zero_data: true } } }'
    ),
    "batch_input_sources": with_config(
        'max_batch_size: 4\nbatch_input { kind: BATCH_ELEMENT_COUNT target_name: "T" data_type: TYPE_FP32 }'
    ),
    "batch_input_type": with_config(
        'max_batch_size: 4\nbatch_input { kind: BATCH_ELEMENT_COUNT target_name: "T" data_type: TYPE_INT8 source_input: "I" }'
    ),
    "batch_input_unknown": with_config(
        'max_batch_size: 4\nbatch_input { kind: BATCH_ELEMENT_COUNT target_name: "T" data_type: TYPE_FP32 source_input: "X" }'
    ),
    "batch_output_unknown": with_config(
        'max_batch_size: 4\nbatch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "X" source_input: "I" }'
    ),
    "syntax_error": python("def execute(:\n"),
    "import_error": python("import no_such_module\n"),
    "no_class": python("value = 1\n"),
    "no_execute": python("class TritonPythonModel:\n    pass\n"),
    "initialize_raises": python("class TritonPythonModel:\n    def initialize(self, args):\n        raise KeyError('lost')\n"
                                "    def execute(self, requests):\n        return []\n"),
    "constructor_raises": python("class TritonPythonModel:\n    def __init__(self):\n        raise ValueError('built wrongly')\n"
                                 "    def execute(self, requests):\n        return []\n"),
    "complete_raises": completing("raise ValueError('cannot complete')"),
    "complete_returns_nothing": completing("pass"),
    "complete_bad_property": completing("config.add_input({'name': 'I', 'data_type': 'TYPE_FP32', 'dims': [1], 'x': 1})\nreturn config"),
    "complete_bad_output_property": completing("config.add_output({'name': 'O', 'data_type': 'TYPE_FP32', 'dims': [1], 'optional': True})\nreturn config"),
    "complete_no_name": completing("config.add_input({'data_type': 'TYPE_FP32', 'dims': [1]})\nreturn config"),
    "complete_no_type": completing("config.add_input({'name': 'I', 'dims': [1]})\nreturn config"),
    "complete_no_dims": completing("config.add_output({'name': 'O', 'data_type': 'TYPE_FP32'})\nreturn config"),
    "complete_other_type": completing("config.add_input({'name': 'I', 'data_type': 'TYPE_INT8', 'dims': [4]})\nreturn config", PYTHON + IO),
    "complete_other_dims": completing("config.add_input({'name': 'I', 'data_type': 'TYPE_FP32', 'dims': [5]})\nreturn config", PYTHON + IO),
    "complete_smaller_batch": completing("config.set_max_batch_size(2)\nreturn config", PYTHON + IO + "max_batch_size: 8"),
    "complete_scheduler": completing("config.set_dynamic_batching()\nreturn config", PYTHON + IO + "max_batch_size: 8\nsequence_batching { }"),
    "complete_policy": completing("config.set_model_transaction_policy({'x': True})\nreturn config"),
    "complete_decoupled": completing(
        "config.set_model_transaction_policy({'decoupled': True})\nreturn config", PYTHON + IO + "model_transaction_policy { decoupled: false }"
    ),
    "complete_nothing_at_all": Broken(PYTHON),
    "ensemble_no_scheduling": Broken('platform: "ensemble"' + IO, {"1/.keep": ""}),
    "ensemble_no_steps": ensemble(),
    "ensemble_scheduling_elsewhere": Broken(PYTHON + IO + "ensemble_scheduling { " + step("plus_one", "X:I", "Y:O") + "}"),
    "ensemble_with_instances": ensemble(step("plus_one", "X:I", "Y:O"), extra="instance_group [ { count: 1 } ]"),
    "ensemble_missing_member": ensemble(step("absent", "X:I", "Y:O")),
    "ensemble_no_model_name": ensemble(step("", "X:I", "Y:O")),
    "ensemble_no_input_map": ensemble(step("plus_one", "", "Y:O")),
    "ensemble_no_output_map": ensemble(step("plus_one", "X:I", "")),
    "ensemble_output_twice": ensemble(step("plus_one", "X:I", "Y:O"), step("plus_one", "X:I", "Y:O")),
    "ensemble_input_unused": ensemble(step("plus_one", "X:a", "Y:O")),
    "ensemble_output_unwritten": ensemble(step("plus_one", "X:I", "Y:a")),
    "ensemble_tensor_unused": ensemble(step("plus_one", "X:I", "Y:O"), step("plus_one", "X:I", "Y:spare")),
    "ensemble_circular": ensemble(step("ensemble_circular", "I:I", "O:O")),
    "ensemble_wrong_input": ensemble(step("plus_one", "Z:I", "Y:O")),
    "ensemble_wrong_output": ensemble(step("plus_one", "X:I", "Z:O")),
    "ensemble_input_unmapped": ensemble(step("add_sub", "INPUT0:I", "OUTPUT0:O")),
    "ensemble_wrong_type": ensemble(step("add_sub", "INPUT0:I INPUT1:I", "OUTPUT0:O")),
    "ensemble_wrong_shape": ensemble(
        step("add_sub_fp32", "INPUT0:I INPUT1:I", "OUTPUT0:O"), extra="max_batch_size: 4"
    ),
    "ensemble_batch_too_large": ensemble(step("plus_one", "X:I", "Y:O"), extra="max_batch_size: 64"),
    "ensemble_version_absent": ensemble(step("plus_one", "X:I", "Y:O").replace("-1", "7")),
    "ensemble_member_broken": ensemble(step("initialize_raises", "I:I", "O:O")),
}  # fmt: skip

#: Models that crash Triton or take it minutes, with conch's error (a regular expression).
OURS: dict[str, str] = {
    "no_model_file": r".*model\.py.*",
    "other_filename": r".*absent\.py.*",
}
RECORDED = Path(__file__).with_suffix(".json")

Answer = tuple[int, str]


def lay_out(repository: Path) -> Path:
    """Write all models, and the models that the ensembles use."""
    build(repository, "plus_one", "add_sub", "add_sub_fp32")
    for name, broken in BROKEN.items():
        write(repository, name, broken.config, broken.files)
    return repository


def load_all(address: str, repository: Path, names: list[str]) -> dict[str, Answer]:
    """Load models on a server in explicit mode, one after another, because several concurrent loads crash Triton.

    Returns status and message by name, without the repository's path; models without a response are missing.
    """
    answers = {}
    for name in names:
        try:
            reply = send(address, Request("POST", f"/v2/repository/models/{name}/load", b""), timeout=10)
        except OSError:
            continue
        answers[name] = reply.status, normalised(reply.error, repository) if reply.body else ""
    return answers


def normalised(message: str, repository: Path) -> str:
    """Return a message without the traceback frames outside the model's own file."""
    frames = re.compile(r"^  (.*)\(\d+\): .*\n", re.MULTILINE)
    message = frames.sub(lambda found: found[0] if found[1].startswith(str(repository)) else "", message)
    return message.replace(str(repository), "{repository}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        models = lay_out(Path(folder))
        with TritonServer(models, "--model-control-mode=explicit") as triton:
            recorded = load_all(triton.http, models, [name for name in BROKEN if name not in OURS])
    RECORDED.write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n")
