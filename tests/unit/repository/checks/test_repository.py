"""``conch check``: every fault of a repository is one line with file, line and remedy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from conch.cli.check import check_command
from conch.repository.backends import BackendDirectories
from conch.repository.checks import checkpoints
from conch.repository.checks.finding import Finding
from conch.repository.checks.repository import check

GOOD = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
COMPLETE = GOOD + "    @staticmethod\n    def auto_complete_config(config): ...\n"
OUTPUT = 'output { name: "B" data_type: TYPE_FP32 dims: 4 }\n'
IO = f'input {{ name: "A" data_type: TYPE_FP32 dims: 4 }}\n{OUTPUT}'


@pytest.fixture(autouse=True)
def all_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine is installed."""
    monkeypatch.setattr(checkpoints, "is_installed", lambda module: True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    put(tmp_path, "good/config.pbtxt", IO)
    put(tmp_path, "good/1/model.py", GOOD)
    return tmp_path


def put(repository: Path, path: str, text: str = "") -> None:
    file = repository / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def lines(repository: Path) -> list[str]:
    return [str(finding).replace(f"{repository}/", "") for finding in check([repository])]


def test_good_repository_has_no_findings(repository: Path) -> None:
    put(repository, "complete/1/model.py", COMPLETE)
    put(
        repository,
        "chain/config.pbtxt",
        f'platform: "ensemble"\n{IO}ensemble_scheduling {{ step {{ model_name: "good" model_version: -1 '
        'input_map { key: "A" value: "A" } output_map { key: "B" value: "B" } } }',
    )
    (repository / "chain" / "1").mkdir()

    assert lines(repository) == []


def test_misspelt_field_is_found_with_its_line_and_the_right_name(repository: Path) -> None:
    put(repository, "m/config.pbtxt", "# comment\nmax_batchsize: 4\n")

    assert lines(repository) == [
        'm/config.pbtxt:2: error: failed to read text proto: Message type "inference.ModelConfig" has no field named '
        "\"max_batchsize\". (fix: did you mean 'max_batch_size'?)"
    ]


def test_every_fault_of_a_configuration_is_reported_at_its_line(repository: Path) -> None:
    put(
        repository,
        "m/config.pbtxt",
        'name: "n"\nbackend: "python"\nmax_batch_size: -1\ninput [\n  { name: "A" data_type: TYPE_FP32 dims: 1 },\n'
        f'  {{ name: "B"\n    data_type: TYPE_FP32\n    dims: [ 0 ] }}\n]\n{OUTPUT}',
    )
    put(repository, "m/1/model.py", GOOD)

    assert [line.split(": ")[0] for line in lines(repository)] == [
        "m/config.pbtxt:1", "m/config.pbtxt:3", "m/config.pbtxt:8",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "finding"),
    [
        ("def f(:\n", "m/1/model.py:1: error: not valid Python: "),
        ("class Model: ...\n", "m/1/model.py:1: error: the class TritonPythonModel is missing (fix: rename Model)"),
        ("\nclass TritonPythonModel:\n    pass\n", "m/1/model.py:2: error: TritonPythonModel has no method execute"),
        ("x = '\0'\n", "m/1/model.py: error: not valid Python: "),
    ],
)
def test_python_model_that_cannot_run_is_found_without_running_it(repository: Path, source: str, finding: str) -> None:
    put(repository, "m/config.pbtxt", IO)
    put(repository, "m/1/model.py", source)

    (line,) = lines(repository)
    assert line.startswith(finding)


@pytest.mark.parametrize(
    "source",
    [
        "from shared import TritonPythonModel\n",
        "from shared import *\n",
        "import shared\nTritonPythonModel = shared.Model\n",
        "class Base: ...\nclass TritonPythonModel(Base): ...\n",
        "class TritonPythonModel:\n    async def execute(self, requests): ...\n",
        "raise SystemExit\nclass TritonPythonModel:\n    execute = print\n",
        f"{GOOD}\npb_utils.InferenceRequest(model_name='m')\npb_utils.InferenceRequest(model_name=name)\n",
        f"{GOOD}\npb_utils.load_model('new', files)\npb_utils.InferenceRequest(model_name='new')\n",
    ],
)
def test_python_model_that_may_run_is_not_complained_about(repository: Path, source: str) -> None:
    put(repository, "m/config.pbtxt", IO)
    put(repository, "m/1/shared.py", GOOD)
    put(repository, "m/1/model.py", source)

    assert lines(repository) == []


def test_tensors_that_the_model_completes_need_not_be_written(repository: Path) -> None:
    put(repository, "m/config.pbtxt", f'input {{ name: "A" }}\n{OUTPUT}')
    put(repository, "m/1/model.py", GOOD)
    assert [line.split(": ", 2)[2] for line in lines(repository)] == [
        "model input 'A' must specify 'data_type' for m",
        "model input 'A' must specify 'dims' for m (fix: a tensor of one number has dims: [ 1 ])",
    ]

    put(repository, "m/1/model.py", COMPLETE)
    assert lines(repository) == []


def test_missing_files_and_versions_are_found(repository: Path) -> None:
    put(repository, "empty/config.pbtxt", 'backend: "python"\n' + IO)
    put(repository, "fileless/config.pbtxt", 'backend: "python"\n' + IO)
    (repository / "fileless" / "1").mkdir()
    put(repository, "some/config.pbtxt", "version_policy { specific { versions: [1, 4] } }\n" + IO)
    put(repository, "some/1/model.py", GOOD)
    put(repository, "some/01/model.py", GOOD)

    found = lines(repository)

    assert [line.split(": ")[:2] for line in found] == [
        ["empty/config.pbtxt:1", "error"],
        ["fileless/1/model.py", "error"],
        ["some", "warning"],
        ["some/config.pbtxt:1", "warning"],
    ]
    assert "at least one version must be available" in found[0]


def test_missing_side_files_are_found(repository: Path) -> None:
    put(
        repository,
        "m/config.pbtxt",
        'output { name: "B" data_type: TYPE_FP32 dims: 4\n label_filename: "labels.txt" }\n'
        'model_warmup { batch_size: 1 inputs { key: "A" value { data_type: TYPE_FP32 dims: 1 '
        'input_data_file: "w" } } }\n'
        'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "$$TRITON_MODEL_DIRECTORY/env.tar.gz" } }\n',
    )
    put(repository, "m/1/model.py", GOOD)

    found = lines(repository)

    assert [line.split(": ")[0] for line in found] == ["m/config.pbtxt:2", "m/config.pbtxt:3", "m/config.pbtxt:4"]
    assert "labels.txt" in found[0]
    assert "m/warmup/w, which is missing" in found[1]
    assert "m/env.tar.gz, which is missing" in found[2]


def test_unknown_and_unavailable_backends_are_distinguished(repository: Path) -> None:
    put(repository, "typo/config.pbtxt", '\nbackend: "pyton"')
    put(repository, "typo/1/model.py", GOOD)
    put(repository, "trt/1/model.plan")

    found = lines(repository)

    assert found[0].startswith("trt: error: unable to find backend library for backend 'tensorrt' (fix: serve ")
    assert found[1] == (
        "typo/config.pbtxt:2: error: unable to find backend library for backend 'pyton', try specifying runtime on the "
        "model configuration. (fix: did you mean 'python'?)"
    )


BACKEND = """
import nowhere_to_be_found

class TritonPythonModel:
    def excute(self, requests):
        pass
"""


def test_model_of_a_python_based_backend_is_checked_with_the_backends_source(repository: Path, tmp_path: Path) -> None:
    put(tmp_path.parent, "backends/mine/model.py", BACKEND)
    put(repository, "based/config.pbtxt", f'backend: "mine"\n{IO}')
    put(repository, "based/1/weights.bin")
    places = BackendDirectories.beginning_with(str(repository.parent / "backends"))

    found = [str(finding) for finding in check([repository], None, places)]

    source = repository.parent / "backends" / "mine" / "model.py"
    assert [line for line in found if not line.startswith(str(source))] == []
    assert f"{source}:5: error: TritonPythonModel has no method execute (fix: rename excute)" in found
    assert any(line.startswith(f"{source}:2: error: there is no module 'nowhere_to_be_found'") for line in found)


def test_model_of_a_python_based_backend_whose_source_is_missing_is_found(repository: Path) -> None:
    put(repository, "based/config.pbtxt", f'backend: "mine"\nruntime: "model.py"\n{IO}')
    put(repository, "based/1/weights.bin")
    [found] = [str(finding) for finding in check([repository], None, BackendDirectories.beginning_with("/nowhere"))]
    assert "config.pbtxt:2: error: unable to find Python backend based backend library 'model.py'" in found
    assert "(fix: put it at /nowhere/mine/model.py, or start the server with --backend-directory)" in found


def ensemble(*steps: tuple[str, str, str]) -> str:
    text = "".join(
        f'step {{ model_name: "{model}" model_version: -1 input_map {{ key: "A" value: "{read}" }} '
        f'output_map {{ key: "B" value: "{written}" }} }}\n'
        for model, read, written in steps
    )
    return f'platform: "ensemble"\n{IO}ensemble_scheduling {{\n{text}}}\n'


def test_ensembles_are_checked_against_their_members(repository: Path) -> None:
    for name, text in {
        "lost": ensemble(("good", "A", "X"), ("nope", "X", "B")),
        "misfit": ensemble(("wide", "A", "B")),
        "loop": ensemble(("loop", "A", "B")),
        "old": ensemble(("good", "A", "B")).replace("-1", "7"),
        "blind": ensemble(("bare", "A", "B")),
    }.items():
        put(repository, f"{name}/config.pbtxt", text)
        (repository / name / "1").mkdir()
    put(repository, "wide/config.pbtxt", IO.replace("dims: 4", "dims: 8"))
    put(repository, "wide/1/model.py", GOOD)
    put(repository, "bare/1/model.py", COMPLETE)

    found = lines(repository)

    assert [line.split(": ", 2)[2] for line in found] == [
        "circular dependency between ensembles: loop -> ... -> loop -> loop",
        "ensemble lost contains models that are not available or ambiguous: nope (fix: add it to the repository)",
        "in ensemble misfit, ensemble tensor A: inconsistent shape: [4] is inferred from model misfit while [8] is "
        "inferred from model wide",
        "in ensemble misfit, ensemble tensor B: inconsistent shape: [4] is inferred from model misfit while [8] is "
        "inferred from model wide",
        "ensemble 'old' depends on 'good' whose required version 7 is not loaded. "
        "(fix: model_version: -1 is the latest version)",
    ]
    assert found[1].startswith("lost/config.pbtxt:6: error: ")


def test_model_in_two_repositories_is_found(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "good").mkdir()

    (finding,) = check([repository, other])

    assert finding.problem == "model appears in two or more repositories"


def test_directory_that_is_not_a_repository_is_reported(repository: Path) -> None:
    nope = repository / "nope"
    assert check([nope]) == [
        Finding(
            nope,
            0,
            "error",
            f"repository path is not a valid directory: {nope} does not exist",
            "use a model repository",
        )
    ]
    (finding,) = check([repository / "good"])
    assert finding.fix == f"give {repository}"


def test_command_prints_findings_and_fails_on_errors(repository: Path) -> None:
    runner = CliRunner()
    good = runner.invoke(check_command, [str(repository)], standalone_mode=False)
    put(repository, "m/config.pbtxt", "nam: 1")
    bad = runner.invoke(check_command, [str(repository)], standalone_mode=False)

    assert (good.return_value, good.stdout) == (0, "")
    assert bad.return_value == 1
    assert bad.stdout.startswith(f"{repository}/m/config.pbtxt:1: error: ")


def test_paths_are_shown_as_they_were_given(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(repository, "models/m/config.pbtxt", "nam: 1")
    monkeypatch.chdir(repository)
    done = CliRunner().invoke(check_command, ["models"], standalone_mode=False)
    assert done.stdout.startswith("models/m/config.pbtxt:1: error: ")


def test_warnings_alone_are_no_failure(repository: Path) -> None:
    put(repository, "good/01/model.py", GOOD)

    done = CliRunner().invoke(check_command, [str(repository)], standalone_mode=False)

    assert done.return_value == 0
    assert "warning: ignore version directory '01'" in done.stdout


def test_named_configuration_is_checked_instead(repository: Path) -> None:
    put(repository, "good/configs/big.pbtxt", "nam: 1")

    assert check([repository]) == []
    (finding,) = check([repository], "big")
    assert finding.path.name == "big.pbtxt"


def parameter(name: str, value: str = "1") -> str:
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'


FILES = {
    "huggingface": "model.json", "vllm": "model.json", "tensorrtllm": "model.json", "onnxruntime": "model.onnx",
    "openvino": "model.xml", "python": "model.py",
}  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "name", "found"),
    [
        ("huggingface", "max_num_seqs", ""),
        (
            "huggingface",
            "max_num_seq",
            "error: parameter 'max_num_seq' is not known (fix: did you mean 'max_num_seqs'?",
        ),
        (
            "huggingface",
            "trust_remote_cod",
            "error: parameter 'trust_remote_cod' is not known (fix: did you mean 'trust_rem",
        ),
        (
            "huggingface",
            "team",
            "error: parameter 'team' is unknown to backend 'huggingface' (fix: it has aggregation_str",
        ),
        ("vllm", "Max_Model_Len", "error: parameter 'Max_Model_Len' is not known (fix: did you mean 'max_model_len'?"),
        ("vllm", "REPORT_CUSTOM_METRICS", ""),
        (
            "tensorrtllm",
            "max_beam_widht",
            "error: parameter 'max_beam_widht' is not known (fix: did you mean 'max_beam_width",
        ),
        ("tensorrtllm", "cuda_graph_mode", ""),
        (
            "onnxruntime",
            "intra_op_thread_cont",
            "error: parameter 'intra_op_thread_cont' is not known (fix: did you mean",
        ),
        ("onnxruntime", "session.use_env_allocators", ""),
        ("openvino", "NUM_STREAM", "error: parameter 'NUM_STREAM' is not known (fix: did you mean 'NUM_STREAMS'?"),
        ("openvino", "team", "warning: parameter 'team' has no effect"),
        ("python", "team", ""),
        (
            "python",
            "EXECUTION_ENV_PATHS",
            "warning: parameter 'EXECUTION_ENV_PATHS' is not known (fix: did you mean 'EXECUT",
        ),
    ],
)
def test_names_of_parameters_are_compared_with_those_of_the_backend(
    repository: Path, backend: str, name: str, found: str
) -> None:
    put(repository, "m/config.pbtxt", f'backend: "{backend}"\n{IO}{parameter(name)}')
    put(repository, f"m/1/{FILES[backend]}", '{"model": "org/name"}' if FILES[backend] == "model.json" else GOOD)

    [*others, last] = lines(repository) or [""]
    assert not others
    assert last.startswith(f"m/config.pbtxt:4: {found}" if found else "")
    assert bool(last) == bool(found)


def test_parameter_that_is_a_placeholder_is_not_set(repository: Path) -> None:
    put(repository, "m/config.pbtxt", f'backend: "tensorrtllm"\n{IO}{parameter("max_beam_widht", "${max_beam_width}")}')
    (repository / "m" / "1").mkdir()

    assert lines(repository) == []


@pytest.mark.parametrize(
    ("backend", "text", "found"),
    [
        ("huggingface", '{"model": "org/name", "max_length": 64}', ""),
        ("huggingface", '{\n  "model": "org/name",\n  "max_lenght": 64\n}', "3: error: parameter 'max_lenght' is not"),
        ("huggingface", '{"model": "org/name", "gpu_memory_utilization": 0.5}', "1: error: parameter 'gpu_memory_util"),
        (
            "huggingface",
            '{"model": "org/name"\n "task": "ner"}',
            "2: error: not valid JSON: Expecting ',' delimiter at",
        ),
        ("huggingface", '["org/name"]', "1: error: must hold a JSON object (fix: "),
        ("vllm", '{"model": "org/name", "gpu_memory_utilization": 0.5, "brand_new": 1}', ""),
        (
            "vllm",
            '{"model": "org/name", "gpu_memory_utilisation": 0.5}',
            "1: error: parameter 'gpu_memory_utilisation'",
        ),
    ],
)
def test_model_file_is_read(repository: Path, backend: str, text: str, found: str) -> None:
    put(repository, "m/config.pbtxt", f'backend: "{backend}"\n')
    put(repository, "m/1/model.json", text)

    [line] = lines(repository) or [""]
    assert line.startswith(f"m/1/model.json:{found}" if found else "")
    assert bool(line) == bool(found)


def test_no_library_that_runs_models_is_imported(tmp_path: Path) -> None:
    """So that a repository can be checked where its models do not run."""
    put(tmp_path, "m/1/model.json", '{"task": "fill-mask"}')
    put(tmp_path, "m/1/config.json", '{"architectures": ["BertForMaskedLM"], "model_type": "bert"}')
    put(tmp_path, "n/config.pbtxt", f'backend: "onnxruntime"\n{IO}')
    put(tmp_path, "n/1/model.onnx")
    program = (
        "import sys; from pathlib import Path; from conch.repository.checks.repository import check;"
        f"assert check([Path({str(tmp_path)!r})]);"
        "print(sorted({'torch', 'transformers', 'onnxruntime', 'openvino', 'huggingface_hub'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("m/1/model.json", json.dumps({"model": "/nowhere"}).encode("utf-16")),
        ("m/1/model.json", b"[" * 100_000),
        ("m/1/model.json", b'{"model": "./a\\u0000b"}'),
        ("m/1/model.json", b'{"model": ["org/name"]}'),
        ("m/1/config.json", b'{"architectures": 3}'),
        ("m/1/config.json", b"{"),
        ("m/1/model.gguf", b"GGU"),
        ("m/1/model.py", bytes(range(256))),
        ("m/1/model.py", b"x = " + b"-" * 50_000 + b"1"),
        ("m/config.pbtxt", "name: 'é'".encode("latin-1")),
        ("m/config.pbtxt", b""),
        ("m/1/model.json/a", b""),
        ("m/config.pbtxt/a", b""),
    ],
)
def test_whatever_lies_in_a_repository_is_a_finding_and_no_crash(tmp_path: Path, path: str, content: bytes) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_bytes(content)
    assert any(finding.path.is_relative_to(tmp_path / "m") for finding in check([tmp_path]))


@pytest.mark.parametrize(("name", "found"), [("folder", "has no bin/activate"), ("file", "is not an archive")])
def test_an_invalid_environment_is_reported(repository: Path, name: str, found: str) -> None:
    put(repository, "m/folder/pyvenv.cfg")
    put(repository, "m/file")
    put(repository, "m/config.pbtxt", IO + parameter("EXECUTION_ENV_PATH", f"$$TRITON_MODEL_DIRECTORY/{name}"))
    put(repository, "m/1/model.py", GOOD)
    assert any(found in line and line.startswith("m/config.pbtxt:3: error: ") for line in lines(repository))
