"""The usual mistakes in a model repository, each one as a small repository with what ``conch check`` says of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from conch.repository.checks import checkpoints, configuration
from conch.repository.checks.repository import check

MODEL = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
INPUT = 'input { name: "A" data_type: TYPE_FP32 dims: 4 }\n'
OUTPUT = 'output { name: "B" data_type: TYPE_FP32 dims: 4 }\n'
IO = INPUT + OUTPUT
ADD = f'backend: "python"\n{IO}'
BERT = json.dumps({"architectures": ["BertForMaskedLM"], "model_type": "bert"})
#: A checkpoint for fill-mask whose weights are one empty file of safetensors.
CHECKPOINT = {"config.json": BERT, "tokenizer.json": "{}", "model.safetensors": "\2\0\0\0\0\0\0\0{}"}


def checkpoint(folder: str, **others: str) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in {**CHECKPOINT, **others}.items()}


def python_model(source: str, config: str = ADD) -> dict[str, str]:
    return {"m/config.pbtxt": config, "m/1/model.py": source}


def configured(config: str) -> dict[str, str]:
    return python_model(MODEL, config)


@dataclass(frozen=True)
class Mistake:
    """A repository with one mistake: its files, and all that is found, with ``R`` for the repository's path.

    All engines are installed but the modules ``absent``.
    """

    files: Mapping[str, str]
    found: str
    absent: tuple[str, ...] = ()


REMOTE = 'backend: "remote"\nparameters { key: "url" value { string_value: "grpc://host:8001" } }\n'

CLASS = "class TritonPythonModel:\n"
SENDING = CLASS + "    def execute(self, requests):\n        requests[0].get_response_sender().send(None)\n"
CALLING = "    def call(self):\n        return pb_utils.InferenceRequest(model_name='%s', inputs=[]).exec()\n"

MISTAKES = {
    "execute without self": Mistake(
        python_model(CLASS + "    def execute(requests):\n        return []\n"),
        "R/m/1/model.py:2: error: execute is called with self and requests (fix: def execute(self, requests))",
    ),
    "execute without return": Mistake(
        python_model(CLASS + "    def execute(self, requests):\n        responses = []\n"),
        "R/m/1/model.py:2: error: execute returns no responses (fix: return a list of them)",
    ),
    "initialise": Mistake(
        python_model(MODEL + "    def initialise(self, args): ...\n"),
        "R/m/1/model.py:4: warning: nothing calls initialise (fix: rename it initialize)",
    ),
    "finalise": Mistake(
        python_model(MODEL + "    def finalise(self): ...\n"),
        "R/m/1/model.py:4: warning: nothing calls finalise (fix: rename it finalize)",
    ),
    "a response sender without decoupling": Mistake(
        python_model(SENDING),
        "R/m/1/model.py:3: warning: the model has a response sender but is not decoupled, so it may send only "
        "one response (fix: model_transaction_policy { decoupled: true })",
    ),
    "a warm-up for an input that does not exist": Mistake(
        configured(
            ADD + 'model_warmup { name: "w" batch_size: 1 inputs { key: "X" value { data_type: TYPE_FP32 dims: 4 '
            "zero_data: true } } }"
        ),
        "R/m/config.pbtxt:4: error: [request id: <id_unknown>] unexpected inference input 'X' for model 'm' "
        "(fix: its inputs are A)",
    ),
    "a call of a model that is not in the repository": Mistake(
        {
            **python_model(MODEL + CALLING % "ohter"),
            "other/config.pbtxt": ADD,
            "other/1/model.py": MODEL,
        },
        "R/m/1/model.py:5: warning: there is no model 'ohter' to call (fix: did you mean 'other'?)",
    ),
    # Names and places of files.
    "a configuration in JSON": Mistake(
        {"m/config.json": '{"backend": "python"}', "m/1/model.py": MODEL + "    def auto_complete_config(): ...\n"},
        "R/m/config.json: error: the server reads config.pbtxt only, but this is a configuration in JSON "
        "(fix: write it as text proto to config.pbtxt)",
    ),
    "a configuration in JSON and nothing else": Mistake(
        {"m/config.json": '{"backend": "python"}', "other/config.pbtxt": ADD, "other/1/model.py": MODEL},
        "R/m/config.json: error: the server reads config.pbtxt only, but this is a configuration in JSON "
        "(fix: write it as text proto to config.pbtxt)",
    ),
    "a configuration with a misspelt name": Mistake(
        {"m/config.pbtx": ADD, "m/1/model.py": MODEL + "    def auto_complete_config(): ...\n"},
        "R/m/config.pbtx: error: the server reads config.pbtxt only (fix: rename it config.pbtxt)",
    ),
    "a configuration with an editor's ending": Mistake(
        {"m/config.pbtxt.txt": ADD, "m/1/model.py": MODEL + "    def auto_complete_config(): ...\n"},
        "R/m/config.pbtxt.txt: error: the server reads config.pbtxt only (fix: rename it config.pbtxt)",
    ),
    "a model without a version directory": Mistake(
        {"m/config.pbtxt": ADD, "m/model.py": MODEL},
        "R/m/model.py: error: a model's files must be in a version directory (fix: move them to R/m/1)",
    ),
    "a checkpoint without a version directory": Mistake(
        checkpoint("m"),
        "R/m/config.json: error: a model's files must be in a version directory (fix: move them to R/m/1)",
    ),
    "a version directory that is no number": Mistake(
        {"m/config.pbtxt": ADD, "m/1/model.py": MODEL, "m/v2/model.py": MODEL},
        "R/m: warning: ignore version directory 'v2' which fails to convert to integral number "
        "(fix: use a number as its name, such as 1)",
    ),
    "no version directory that is a number": Mistake(
        {"m/v1/model.py": MODEL},
        "R/m: error: ignore version directory 'v1' which fails to convert to integral number "
        "(fix: use a number as its name, such as 1)",
    ),
    "a model's file with a misspelt name": Mistake(
        {"m/config.pbtxt": IO, "m/1/models.py": MODEL},
        "R/m/1/models.py: error: the server reads model.py only (fix: rename it model.py)",
    ),
    "a model's file that is missing": Mistake(
        {"m/config.pbtxt": ADD, "m/1/README.md": ""},
        "R/m/1/model.py: error: the model's file is missing (fix: put it there, or set default_model_filename)",
    ),
    "a repository not a model": Mistake(
        {"models/n/config.pbtxt": ADD, "models/n/1/model.py": MODEL, **python_model(MODEL)},
        "R/models: error: this is a repository of models such as 'n', not a model (fix: give R/models)",
    ),
    "the directory above a repository": Mistake(
        {"models/m/config.pbtxt": ADD, "models/m/1/model.py": MODEL, "README.md": ""},
        "R: error: R is not a repository of models, but models in it is (fix: give R/models)",
    ),
    "a checkpoint in the place of a repository": Mistake(
        {name.removeprefix("x/"): text for name, text in checkpoint("x").items()},
        "R: error: R is a checkpoint, not a repository of models (fix: serve it with 'conch serve R')",
    ),
    "a model in the place of a repository": Mistake(
        {"config.pbtxt": ADD, "1/model.py": MODEL},
        "R: error: R is a model, not a repository of models (fix: give P)",
    ),
    "an empty repository": Mistake(
        {"README.md": ""},
        "R: warning: this repository has no models (fix: make a directory for each model, such as R/NAME/1/model.json)",
    ),
    # Models that other servers run.
    "a remote model with instances": Mistake(
        {"m/config.pbtxt": REMOTE + "instance_group { count: 2 }\n"},
        "R/m/config.pbtxt:3: error: remote model 'm' may not have 'instance_group': its instances are those of the "
        "remote server (fix: leave 'instance_group' out)",
    ),
    "a remote model with an address without a protocol": Mistake(
        {"m/config.pbtxt": REMOTE.replace("grpc://", "")},
        "R/m/config.pbtxt:2: error: url 'host:8001' is not the address of a server (fix: it must begin with http://, "
        "https://, grpc:// or grpcs://)",
    ),
    "a remote model with a misspelt parameter": Mistake(
        {"m/config.pbtxt": REMOTE + 'parameters { key: "timeout_sec" value { string_value: "5" } }\n'},
        "R/m/config.pbtxt:3: error: parameter 'timeout_sec' is not known (fix: did you mean 'timeout_secs'?)",
    ),
    # config.pbtxt.
    "a misspelt field": Mistake(
        configured("max_batchsize: 4\n"),
        'R/m/config.pbtxt:1: error: failed to read text proto: Message type "inference.ModelConfig" has no field named '
        "\"max_batchsize\". (fix: did you mean 'max_batch_size'?)",
    ),
    "the protocol's name of a datatype": Mistake(
        configured('input {\n  data_type: TYPE_BYTES\n  name: "A"\n}\n'),
        "R/m/config.pbtxt:2: error: failed to read text proto: ' data_type: TYPE_BYTES': Enum type "
        "\"inference.DataType\" has no value named TYPE_BYTES. (fix: did you mean 'TYPE_STRING'?)",
    ),
    "a bracket that is not closed": Mistake(
        configured('\ninput {\n  name: "A"\n'),
        'R/m/config.pbtxt:3: error: failed to read text proto: Expected "}". (fix: close the bracket of line 2)',
    ),
    "a parameter as plain text": Mistake(
        configured(f'{IO}parameters {{\n  key: "k"\n  value: "v"\n}}\n'),
        'R/m/config.pbtxt:5: error: failed to read text proto: \' value: "v"\': Expected "{". '
        '(fix: write { string_value: "v" })',
    ),
    "another model's name": Mistake(
        configured(f'name: "n"\n{IO}'),
        "R/m/config.pbtxt:1: error: unexpected directory name 'm' for model 'n', directory name must equal model name "
        "(fix: use name: \"m\" or leave 'name' out)",
    ),
    "a misspelt backend": Mistake(
        configured(f'{IO}backend: "pyton"\n'),
        "R/m/config.pbtxt:3: error: unable to find backend library for backend 'pyton', try specifying runtime on the "
        "model configuration. (fix: did you mean 'python'?)",
    ),
    "a backend that there is not": Mistake(
        {"m/config.pbtxt": f'{IO}platform: "tensorrt_plan"\n', "m/1/model.plan": ""},
        "R/m/config.pbtxt:1: error: unable to find backend library for backend 'tensorrt' (fix: serve the ONNX file "
        'that the plan was built from with backend "onnxruntime", whose accelerator "tensorrt" builds plans itself)',
    ),
    "a tensor without dimensions": Mistake(
        configured(f'{OUTPUT}input {{ name: "A" data_type: TYPE_FP32 }}\n'),
        "R/m/config.pbtxt:2: error: model input 'A' must specify 'dims' for m "
        "(fix: a tensor of one number has dims: [ 1 ])",
    ),
    "a dimension of 0": Mistake(
        configured(f'{OUTPUT}input {{ name: "A" data_type: TYPE_FP32 dims: 0 }}\n'),
        "R/m/config.pbtxt:2: error: model input 'A' dimension must be integer >= 1, or -1 to indicate a variable-size "
        "dimension for m (fix: dims: [ -1 ] takes any number)",
    ),
    "a configuration without output": Mistake(
        configured(INPUT),
        "R/m/config.pbtxt:1: warning: the configuration of model 'm' declares no output (fix: write output "
        '{ name: "…" data_type: TYPE_FP32 dims: [ 1 ] } here, or auto_complete_config in model.py)',
    ),
    "a tensor that is declared twice": Mistake(
        configured(f"{IO}{INPUT}"),
        "R/m/config.pbtxt:3: error: input 'A' is declared twice (fix: leave one out)",
    ),
    "a preferred batch that is too large": Mistake(
        configured(f"{IO}max_batch_size: 4\ndynamic_batching {{ preferred_batch_size: 8 }}\n"),
        "R/m/config.pbtxt:4: error: dynamic batching preferred size must be <= max batch size for m "
        "(fix: max_batch_size is 4)",
    ),
    "batching without a batch size": Mistake(
        configured(f"{IO}dynamic_batching {{ }}\n"),
        "R/m/config.pbtxt:3: warning: 'dynamic_batching' has no effect without 'max_batch_size' "
        "(fix: max_batch_size: 8, if the model accepts batches)",
    ),
    "instances on a GPU that there is not": Mistake(
        configured(f"{IO}instance_group [\n  {{ kind: KIND_GPU }}\n]\n"),
        "R/m/config.pbtxt:4: warning: the model requires a GPU, but this machine has no GPU; it cannot load here "
        "(fix: KIND_AUTO uses a GPU if there is one)",
    ),
    "sequences in rows that cannot be told from empty ones": Mistake(
        configured(f"{IO}max_batch_size: 4\nsequence_batching {{ }}\n"),
        "R/m/config.pbtxt:4: warning: batches of the direct strategy may have rows without a request, which the model "
        "cannot distinguish (fix: a control_input of kind CONTROL_SEQUENCE_READY, or oldest { })",
    ),
    "sequences of a backend that has none": Mistake(
        {f"m/1/{name}": text for name, text in CHECKPOINT.items()} | {"m/config.pbtxt": "sequence_batching { }\n"},
        "R/m/config.pbtxt:1: error: model 'm' uses sequence batching, which backend 'huggingface' does not support "
        "(fix: dynamic_batching { })",
    ),
    "labels that are missing": Mistake(
        configured(f'{INPUT}output {{ name: "B" data_type: TYPE_FP32 dims: 4 label_filename: "labels.txt" }}\n'),
        "R/m/config.pbtxt:2: error: failed to open text file for read R/m/labels.txt: No such file or directory "
        "(fix: put the file there, or leave the field out)",
    ),
    "data of a warm-up that are missing": Mistake(
        configured(
            f'{IO}model_warmup {{ batch_size: 1 inputs {{ key: "A" '
            'value { data_type: TYPE_FP32 dims: 4 input_data_file: "a" } } }\n'
        ),
        "R/m/config.pbtxt:3: error: warmup input 'A' needs R/m/warmup/a, which is missing "
        "(fix: put the file there, or leave the field out)",
    ),
    "an environment that is missing": Mistake(
        configured(
            f'{IO}parameters {{ key: "EXECUTION_ENV_PATH"\n'
            'value { string_value: "$$TRITON_MODEL_DIRECTORY/env" } }\n'
        ),
        "R/m/config.pbtxt:3: error: EXECUTION_ENV_PATH names R/m/env, which is missing "
        "(fix: put the file there, or leave the field out)",
    ),
    # model.py.
    "a model.py that is no Python": Mistake(
        python_model("class TritonPythonModel:\n    def execute(self, requests)\n        return []\n"),
        "R/m/1/model.py:2: error: not valid Python: expected ':' "
        "(fix: python -m py_compile R/m/1/model.py shows the position)",
    ),
    "a class of another name": Mistake(
        python_model(MODEL.replace("TritonPythonModel", "TritonPytonModel")),
        "R/m/1/model.py:1: error: the class TritonPythonModel is missing (fix: rename TritonPytonModel)",
    ),
    "a misspelt method": Mistake(
        python_model(MODEL.replace("execute", "excute")),
        "R/m/1/model.py:2: error: TritonPythonModel has no method execute (fix: rename excute)",
    ),
    "an import that does not exist": Mistake(
        python_model(f"import json\nimport nonesuch.part\n{MODEL}"),
        f"R/m/1/model.py:2: error: there is no module 'nonesuch' (fix: install the package that provides it for "
        f"{sys.executable}, or put it at R/m/1/nonesuch.py)",
    ),
    "a misspelt import": Mistake(
        python_model(f"import numpyy\n{MODEL}"),
        "R/m/1/model.py:1: error: there is no module 'numpyy' (fix: did you mean 'numpy'?)",
    ),
    "an import that a neighbour makes": Mistake(
        {**python_model(f"from helper import x\n{MODEL}"), "m/1/helper.py": "\nfrom jsn import x\n"},
        "R/m/1/helper.py:2: error: there is no module 'jsn' (fix: did you mean 'json'?)",
    ),
    "an input that is not declared": Mistake(
        python_model(f'{MODEL}        pb_utils.get_input_tensor_by_name(request, "a")\n'),
        "R/m/1/model.py:4: warning: the configuration declares no input 'a' (fix: did you mean 'A'?)",
    ),
    "an output that is not declared": Mistake(
        python_model(f'{MODEL}        pb_utils.Tensor("B1", array)\n'),
        "R/m/1/model.py:4: warning: the configuration declares no output 'B1' (fix: did you mean 'B'?)",
    ),
    # Ensembles.
    "a step whose model is missing": Mistake(
        {
            **python_model(MODEL),
            "e/config.pbtxt": f'platform: "ensemble"\n{IO}ensemble_scheduling {{\n  step {{ model_name: "ma" '
            'input_map { key: "A" value: "A" } output_map { key: "B" value: "B" } }\n}\n',
            "e/1/.keep": "",
        },
        "R/e/config.pbtxt:5: error: ensemble e contains models that are not available or ambiguous: ma "
        "(fix: did you mean 'm'?)",
    ),
    "an ensemble without a version directory": Mistake(
        {
            **python_model(MODEL),
            "e/config.pbtxt": f'platform: "ensemble"\n{IO}ensemble_scheduling {{\n  step {{ model_name: "m" '
            'model_version: -1 input_map { key: "A" value: "A" } output_map { key: "B" value: "B" } }\n}\n',
        },
        "R/e/config.pbtxt:1: error: at least one version must be available under the version policy of model 'e' "
        "(fix: make R/e/1)",
    ),
    # The zero-code route.
    "a model.json that is no JSON": Mistake(
        {"m/1/model.json": '{"model": "org/name"\n "task": "ner"}'},
        "R/m/1/model.json:2: error: not valid JSON: Expecting ',' delimiter at column 2 (fix: put a ',' before it)",
    ),
    "a key of model.json that is misspelt": Mistake(
        {"m/1/model.json": '{\n  "model": "org/name",\n  "max_lenght": 64\n}'},
        "R/m/1/model.json:3: error: parameter 'max_lenght' is not known (fix: did you mean 'max_length'?)",
    ),
    "a value of model.json that cannot be": Mistake(
        {"m/1/model.json": '{\n  "model": "org/name",\n  "max_length": "long"\n}'},
        "R/m/1/model.json:3: error: parameter 'max_length' is 'long' "
        "(fix: it must be a whole number that is not negative)",
    ),
    "a folder that is missing": Mistake(
        {"m/1/model.json": '{\n  "model": "../nowhere"\n}'},
        "R/m/1/model.json:2: error: model folder '../nowhere' does not exist "
        "(fix: relative paths start at R/m/1 or R/m)",
    ),
    "a task that does not fit": Mistake(
        {**checkpoint("m/1"), "m/1/model.json": '{\n  "task": "text-classification"\n}'},
        "R/m/1/model.json:2: error: task 'text-classification' does not fit the checkpoint, which is a BertForMaskedLM "
        "(fix: remove 'task', or choose a checkpoint whose architecture is ForSequenceClassification)",
    ),
    "a task that there is not": Mistake(
        {**checkpoint("m/1"), "m/1/model.json": '{\n  "task": "text-clasification"\n}'},
        "R/m/1/model.json:2: error: task 'text-clasification' is not known (fix: did you mean 'text-classification'?)",
    ),
    "a config.json alone": Mistake(
        {"m/1/config.json": BERT},
        "R/m/1: error: checkpoint R/m/1 has no weights: model.safetensors or pytorch_model.bin is "
        "missing (fix: copy the whole checkpoint there, or name it in R/m/1/model.json)",
    ),
    "a checkpoint without a tokenizer": Mistake(
        {name: text for name, text in checkpoint("m/1").items() if "tokenizer" not in name},
        "R/m/1: error: checkpoint R/m/1 has no tokenizer: tokenizer.json (or vocab.txt, spiece.model …) is missing "
        "(fix: copy the whole checkpoint there, or name it in R/m/1/model.json)",
    ),
    "weights that git has not fetched": Mistake(
        checkpoint("m/1", **{"model.safetensors": "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"}),
        "R/m/1: error: R/m/1/model.safetensors is a Git LFS pointer, not the weights (fix: run 'git lfs pull' there)",
    ),
    "an engine that is not installed": Mistake(
        checkpoint("m/1"),
        "R/m/1: warning: engine 'torch' is not installed; the model cannot load on this machine "
        "(fix: install huggingface)",
        absent=("transformers",),
    ),
    "a graph whose engine is not installed": Mistake(
        {"m/config.pbtxt": IO, "m/1/model.onnx": ""},
        "R/m/config.pbtxt:1: warning: engine 'onnxruntime' is not installed; the model cannot load on this machine "
        "(fix: install onnxruntime)",
        absent=("onnxruntime",),
    ),
    "a parameter that is misspelt": Mistake(
        {**checkpoint("m/1"), "m/config.pbtxt": '\nparameters { key: "max_lenght" value { string_value: "64" } }\n'},
        "R/m/config.pbtxt:2: error: parameter 'max_lenght' is not known (fix: did you mean 'max_length'?)",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_each_common_mistake_is_one_line_with_its_location_and_fix(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configuration, "visible_gpus", lambda: ())
    monkeypatch.setattr(checkpoints, "is_installed", lambda module: module not in MISTAKES[name].absent)
    monkeypatch.setattr(checkpoints.extras, "command", lambda *names: f"install {' '.join(names)}")
    repository = tmp_path / "repository"
    for path, text in MISTAKES[name].files.items():
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_text(text)

    found = [str(finding).replace(str(repository), "R").replace(str(tmp_path), "P") for finding in check([repository])]

    assert found == [MISTAKES[name].found]
    assert "(fix: " in found[0]


INITIALIZING = CLASS + "    def initialize(self, args):\n        self.name = 'ohter'\n"
EXECUTE = "    def execute(self, requests):\n        return []\n"
CALLING_VALUE = (
    EXECUTE + "    def call(self):\n        return pb_utils.InferenceRequest(model_name=%s, inputs=[]).exec()\n"
)


def called(tmp_path: Path, source: str) -> list[str]:
    """What is found in a repository with ``other`` and a model with this source."""
    files = {**python_model(source), "other/config.pbtxt": ADD, "other/1/model.py": MODEL}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return [finding.problem for finding in check([tmp_path])]


@pytest.mark.parametrize(
    "source",
    [
        "NAME = 'ohter'\n" + CLASS + CALLING_VALUE % "NAME",
        "NAME: str = 'ohter'\n" + CLASS + CALLING_VALUE % "NAME",
        CLASS + "    NAME = 'ohter'\n" + CALLING_VALUE % "self.NAME",
        CLASS + "    NAME = 'ohter'\n" + CALLING_VALUE % "TritonPythonModel.NAME",
        INITIALIZING + CALLING_VALUE % "self.name",
        INITIALIZING + "        name = args['name']\n" + CALLING_VALUE % "self.name",
    ],
)
def test_a_called_model_is_checked_by_the_constant_that_has_its_name(tmp_path: Path, source: str) -> None:
    assert called(tmp_path, source) == ["there is no model 'ohter' to call"]


@pytest.mark.parametrize(
    "source",
    [
        "NAME = 'other'\n" + CLASS + CALLING_VALUE % "NAME",
        "NAME = 'ohter'\nif True:\n    NAME = 'other'\n" + CLASS + CALLING_VALUE % "NAME",
        "if 1 > 2:\n    NAME = 'ohter'\n" + CLASS + CALLING_VALUE % "NAME",
        "import os\nNAME = os.environ.get('NAME', 'ohter')\n" + CLASS + CALLING_VALUE % "NAME",
        "NAME = 'ohter'\ndef change():\n    global NAME\n    NAME = 'other'\n" + CLASS + CALLING_VALUE % "NAME",
        "NAME = 'ohter'\n" + CLASS + EXECUTE
        + "    def call(self, NAME):\n        pb_utils.InferenceRequest(model_name=NAME)\n",
        "NAME = 'ohter'\nglobals()['NAME'] = 'other'\n" + CLASS + CALLING_VALUE % "NAME",
        "NAME = 'ohter'\nfrom os import *\n" + CLASS + CALLING_VALUE % "NAME",
        CLASS + "    NAME = 'ohter'\n    def initialize(self, args):\n        self.NAME = 'other'\n"
        + CALLING_VALUE % "self.NAME",
        INITIALIZING + "        self.name = args['name']\n" + CALLING_VALUE % "self.name",
        INITIALIZING + "        setattr(self, 'name', 'other')\n" + CALLING_VALUE % "self.name",
        INITIALIZING + "        configure(self)\n" + CALLING_VALUE % "self.name",
        INITIALIZING + CALLING_VALUE % "self.name" + "def configure(model):\n    model.name = 'other'\n",
        INITIALIZING.replace("Model:", "Model(Base):") + CALLING_VALUE % "self.name" + "class Base: pass\n",
        INITIALIZING + CALLING_VALUE % "self.name" + "    @property\n    def name(self): return 'other'\n",
        INITIALIZING + EXECUTE + "class Caller(dict):\n" + CALLING_VALUE % "self.name",
        INITIALIZING + EXECUTE + "    def call(self):\n        def ask(self):\n"
        + "            pb_utils.InferenceRequest(model_name=self.name)\n",
    ],
)  # fmt: skip
def test_a_called_model_whose_name_may_change_is_not_checked(tmp_path: Path, source: str) -> None:
    assert called(tmp_path, source) == []
