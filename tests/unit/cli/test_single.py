"""``conch serve MODEL``: the repository that is made for one model."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from conch.cli import main
from conch.core.errors import ConchError
from conch.core.inference import TensorSpec
from conch.library.announcing import announcer, example
from conch.options.settings import Settings
from conch.repository.single import hub_hint, model_name


@dataclass
class Started:
    """What a fake server was started with, and what lay in its repository."""

    settings: Settings
    name: str
    files: dict[str, Path]
    model_json: dict[str, Any] | None
    on_ready: Callable[..., None] | None
    explain: Callable[[ConchError], Sequence[str]] | None


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    servers: list[Started] = []

    def run(
        settings: Settings,
        on_ready: Callable[..., None] | None = None,
        explain: Callable[[ConchError], Sequence[str]] | None = None,
    ) -> int:
        (model,) = Path(settings.model_repository[0]).iterdir()
        files = {path.name: path.resolve() for path in (model / "1").iterdir()}
        document = json.loads(files["model.json"].read_text()) if "model.json" in files else None
        servers.append(Started(settings, model.name, files, document, on_ready, explain))
        return 0

    app = ModuleType("conch.library.app")
    app.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "conch.library.app", app)
    return servers


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def refusal(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["serve", *arguments]) == 1
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    return output.err.strip()


def test_hub_id_is_served_under_its_last_part(started: list[Started]) -> None:
    assert main(["serve", "org/all-MiniLM-L6-v2"]) == 0

    assert started[0].name == "all-MiniLM-L6-v2"
    assert started[0].model_json == {"model": "org/all-MiniLM-L6-v2"}


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        ("Models", "there is no folder 'Models' here; did you mean 'models'?"),
        ("other/greter", "there is no folder 'other/greter' here; did you mean 'other/greeter'?"),
        ("org/name", "there is no folder 'org/name' here either"),
        ("models", ""),
    ],
)
def test_name_that_is_no_folder_has_a_hint_for_when_the_hub_does_not_have_it(
    model: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "other" / "greeter").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_hint(model) == hint


def test_hint_is_given_where_the_hub_is_the_reason(
    started: list[Started], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["serve", "org/name"])
    explain = started[0].explain
    assert explain is not None
    assert explain(ConchError("the Hub cannot be reached")) == ["there is no folder 'org/name' here either"]
    assert explain(ConchError("port 8000 is taken")) == []


def test_repository_is_gone_when_the_server_has_ended(started: list[Started]) -> None:
    main(["serve", "org/name"])

    assert not Path(started[0].settings.model_repository[0]).exists()


def test_repository_is_gone_when_the_server_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    repositories: list[Path] = []

    def run(settings: Settings, *others: object) -> int:
        repositories.append(Path(settings.model_repository[0]))
        raise RuntimeError("no server today")

    app = ModuleType("conch.library.app")
    app.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "conch.library.app", app)

    with pytest.raises(RuntimeError):
        main(["serve", "org/name"])
    assert [path.exists() for path in repositories] == [False]


def test_what_is_said_of_the_model_goes_into_its_file(started: list[Started]) -> None:
    main(
        [
            "serve",
            "org/name",
            "--task=ner",
            "--engine=torch",
            "--revision=v1",
            "--trust-remote-code",
            "--http-port=9000",
        ]
    )

    assert started[0].model_json == {
        "model": "org/name",
        "task": "ner",
        "engine": "torch",
        "revision": "v1",
        "trust_remote_code": True,
    }
    assert started[0].settings.http_port == 9000


@pytest.mark.parametrize(("value", "verified"), [("false", False), ("true", True)])
def test_verification_on_load_is_chosen_by_a_boolean(started: list[Started], value: str, verified: bool) -> None:
    main(["serve", "org/name", f"--verify-on-load={value}"])

    assert started[0].model_json == {"model": "org/name", "verify_on_load": verified}


def test_value_that_is_no_boolean_is_refused_before_the_model_is_loaded(
    started: list[Started], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "org/name", "--verify-on-load=perhaps"]) == 1

    assert started == []
    assert "'--verify-on-load': 'perhaps' is not a valid boolean" in capsys.readouterr().err


def test_options_of_the_model_name_the_kind_of_their_value_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    main(["serve", "--help"])

    shown = capsys.readouterr().out
    for flag in ("--task TASK", "--engine ENGINE", "--verify-on-load BOOL", "--load-model MODEL"):
        assert f"{flag} " in shown


def test_checkpoint_folder_is_served_where_it_is(started: list[Started], tmp_path: Path) -> None:
    main(["serve", str(checkpoint(tmp_path / "my model"))])

    assert started[0].name == "my_model"
    assert started[0].model_json == {"model": str(tmp_path / "my model")}


def test_relative_folder_is_found_from_anywhere(
    started: list[Started], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(tmp_path / "model")
    monkeypatch.chdir(tmp_path)

    main(["serve", "model"])

    assert started[0].model_json == {"model": str(tmp_path / "model")}


def test_model_may_be_given_a_name(started: list[Started]) -> None:
    main(["serve", "org/name", "--name=other"])

    assert started[0].name == "other"


def test_graph_is_linked_with_the_tensors_beside_it(started: list[Started], tmp_path: Path) -> None:
    for name in ("net.onnx", "net.onnx.data", "net.onnx_data", "tensors.data", "config.json", "other.onnx"):
        (tmp_path / name).touch()

    main(["serve", str(tmp_path / "net.onnx")])

    assert started[0].name == "net"
    assert started[0].files == {
        "model.onnx": tmp_path / "net.onnx",
        "net.onnx.data": tmp_path / "net.onnx.data",
        "net.onnx_data": tmp_path / "net.onnx_data",
        "tensors.data": tmp_path / "tensors.data",
    }


def test_graph_in_the_cache_of_the_hub_is_a_link_whose_name_counts(started: list[Started], tmp_path: Path) -> None:
    for blob, name in (("blob1", "net.onnx"), ("blob2", "net.onnx_data")):
        (tmp_path / blob).touch()
        (tmp_path / name).symlink_to(blob)

    assert main(["serve", str(tmp_path / "net.onnx")]) == 0

    assert started[0].name == "net"
    assert started[0].files == {"model.onnx": tmp_path / "blob1", "net.onnx_data": tmp_path / "blob2"}


def test_openvino_graph_is_linked_with_its_weights(
    started: list[Started], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.xml").touch()
    assert "needs its weights in" in refusal(str(tmp_path / "net.xml"), capsys=capsys)
    (tmp_path / "net.bin").touch()

    main(["serve", str(tmp_path / "net.xml")])

    assert started[0].files == {"model.xml": tmp_path / "net.xml", "model.bin": tmp_path / "net.bin"}


def test_model_is_loaded_where_models_are_loaded_on_request(started: list[Started]) -> None:
    main(["serve", "org/name", "--model-control-mode=explicit"])
    main(["serve", "org/name"])

    assert [one.settings.load_model for one in started] == [("name",), ()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("org/name", "--model-repository=/r"), "pass either the model 'org/name' or --model-repository, not both"),
        (("org/name", "--model-store=/r"), "pass either the model 'org/name' or --model-repository, not both"),
        (("org/name", "stray"), "Unexpected argument: stray"),
        (
            ("--task=ner", "--model-repository=/r"),
            "--task is for 'conch serve MODEL'; for a model of a repository, set",
        ),
        (("org/name", "--name=a/b"), "'a/b' cannot be a model's name: set --name to one without slashes"),
        (("org/name", "--name=.."), "'..' cannot be a model's name"),
        (("./nowhere",), "'./nowhere' does not exist"),
        (("/nowhere/at/all",), "'/nowhere/at/all' does not exist"),
        (("nowhere.onnx",), "'nowhere.onnx' does not exist"),
        (
            ("s3://bucket/models",),
            "'s3://bucket/models' is not a model: serve the repository of models there with --model-",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(
    started: list[Started], arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(*arguments, capsys=capsys)
    assert started == []


@pytest.mark.parametrize(
    ("file", "model", "message"),
    [
        ("models/m/1/model.py", "models", "is a model repository: serve it with --model-repository={}/models"),
        ("models/m/config.pbtxt", "models", "is a model repository: serve it with --model-repository={}/models"),
        ("models/m/1/model.py", "models/m", "is a model of a repository: serve it with --model-repository={}/models"),
        ("models/m/1/model.py", "models/m/1", "is a version of a model: serve it with --model-repository={}/models"),
        ("folder/net.onnx", "folder", "config.json is missing; to serve only the graph, pass {}/folder/net.onnx"),
        ("folder/readme", "folder", "has no checkpoint: config.json is missing"),
        ("net.txt", "net.txt", "is not a model that can be served: use a Hub id, a checkpoint's folder, or a .gguf"),
    ],
)
def test_path_that_is_no_checkpoint_is_refused_with_what_to_do(
    started: list[Started], tmp_path: Path, file: str, model: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()

    assert message.format(tmp_path) in refusal(str(tmp_path / model), capsys=capsys)
    assert started == []


def test_gguf_file_is_served_under_its_name(started: list[Started], tmp_path: Path) -> None:
    file = tmp_path / "SmolLM2.Q4_1.gguf"
    file.touch()

    assert main(["serve", str(file), "--engine=transformers"]) == 0
    assert main(["serve", str(tmp_path)]) == 0

    assert started[0].name == "SmolLM2.Q4_1"
    assert started[0].model_json == {"model": str(file), "engine": "transformers"}
    assert started[1].model_json == {"model": str(file)}
    (tmp_path / "mmproj-SmolLM2.gguf").touch()
    assert main(["serve", str(tmp_path)]) == 0
    assert started[2].model_json == {"model": str(tmp_path)}, "with its projector"


def test_gguf_model_in_several_files_is_served_by_the_first(started: list[Started], tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"blob{number}").touch()
        (tmp_path / f"Llama-0000{number}-of-00002.gguf").symlink_to(f"blob{number}")

    for path, name in ((tmp_path, tmp_path.name), (tmp_path / "Llama-00001-of-00002.gguf", "Llama")):
        assert main(["serve", str(path)]) == 0
        assert started[-1].name == name
        assert started[-1].model_json == {"model": str(tmp_path / "Llama-00001-of-00002.gguf")}


def test_folder_with_several_gguf_files_is_refused(
    started: list[Started], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()

    message = f"'{tmp_path}' has 2 GGUF files: choose one, such as {tmp_path}/a.gguf"
    assert message in refusal(str(tmp_path), capsys=capsys)
    assert started == []


def test_text_model_s_example_is_a_text() -> None:
    names = ("messages", "text_input", "max_tokens", "temperature")
    specs = [TensorSpec(name, "BYTES", (1,), optional=True) for name in names]
    assert example("URL", specs) == (
        """curl URL/generate -d '{"text_input": "Where is the library?", "max_tokens": 50}'"""
    )


def test_option_of_checkpoints_is_refused_for_a_graph(
    started: list[Started], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.onnx").touch()
    assert "--task is for checkpoints" in refusal(str(tmp_path / "net.onnx"), "--task=ner", capsys=capsys)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/models/minilm/1", "minilm"),
        ("/cache/models--org--all-MiniLM/snapshots/0123abc", "all-MiniLM"),
        ("/x/net.v2.onnx", "net.v2"),
        ("/x/e5.v2", "e5.v2"),
        ("/x/.hidden", "hidden"),
        ("/x/été", "t"),
        ("/x/日本", "model"),
        ("/", "model"),
    ],
)
def test_name_is_the_last_part_that_says_something(path: str, name: str) -> None:
    assert model_name(Path(path)) == name


def spec(name: str, datatype: str = "BYTES", optional: bool = False) -> TensorSpec:
    return TensorSpec(name, datatype, (1,), optional=optional)


def test_example_asks_for_what_the_model_needs() -> None:
    line = example("http://localhost:8000/v2/models/m", [spec("text_input"), spec("top_k", "INT32", optional=True)])

    assert line == 'curl http://localhost:8000/v2/models/m/generate -d \'{"text_input": "Where is the library?"}\''


@pytest.mark.parametrize("inputs", [[spec("image")], [spec("input_ids", "INT64")], [spec("samples", optional=True)]])
def test_model_that_takes_something_else_tells_its_tensors(inputs: list[TensorSpec]) -> None:
    assert example("http://localhost:8000/v2/models/m", inputs) == "curl http://localhost:8000/v2/models/m"


@pytest.mark.parametrize(
    ("address", "url"),
    [
        (("0.0.0.0", 9000), "http://localhost:9000"),
        (("192.0.2.1", 4242), "http://192.0.2.1:4242"),
        (("2001:db8::1", 4242), "http://[2001:db8::1]:4242"),
        (("127.0.0.1", 9000), "https://localhost:9000"),
    ],
)
def test_example_is_logged_with_the_address_where_the_server_listens(
    address: tuple[str, int], url: str, started: list[Started], caplog: pytest.LogCaptureFixture
) -> None:
    main(["serve", "org/name", "--http-port=0"])
    signature = SimpleNamespace(inputs={"text_input": spec("text_input")})
    model = SimpleNamespace(signature=signature, statistics=SimpleNamespace(runtime_facts={}))
    server = SimpleNamespace(model=lambda name: model, settings=Settings(http_use_ssl=url.startswith("https")))
    announce = started[0].on_ready
    assert announce is not None

    with caplog.at_level("INFO", logger="conch"):
        announce(server, {"http": address})

    (record,) = caplog.records
    assert record.__dict__["table"].startswith(f"curl {url}/v2/models/name/generate -d")


@pytest.mark.parametrize(
    ("template", "path"), [("yes", "/v1/chat/completions"), ("none", "/v2/models/chatty/generate")]
)
def test_model_with_a_chat_template_is_asked_in_a_conversation(
    template: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    specs = {name: spec(name, optional=True) for name in ("messages", "text_input", "max_tokens")}
    told = SimpleNamespace(runtime_facts={"engine": "swan", "chat_template": template})
    model = SimpleNamespace(signature=SimpleNamespace(inputs=specs), statistics=told)
    server: Any = SimpleNamespace(model=lambda name: model, settings=Settings())

    with caplog.at_level("INFO", logger="conch"):
        announcer("chatty")(server, {"http": ("127.0.0.1", 8000)})

    (record,) = caplog.records
    command = shlex.split(record.__dict__["table"])
    assert command[1] == f"http://localhost:8000{path}"
    if template == "yes":
        body = json.loads(command[-1])
        assert body["model"] == "chatty" and body["messages"][0]["role"] == "user"


@pytest.mark.parametrize("template", ["yes", "none"])
def test_example_of_a_model_with_an_unusual_name_is_one_url_and_one_body(
    template: str, caplog: pytest.LogCaptureFixture
) -> None:
    told = SimpleNamespace(runtime_facts={"chat_template": template})
    signature = SimpleNamespace(inputs={"text_input": spec("text_input")})
    model = SimpleNamespace(signature=signature, statistics=told)
    server: Any = SimpleNamespace(model=lambda name: model, settings=Settings())

    with caplog.at_level("INFO", logger="conch"):
        announcer("Ada's model")(server, {"http": ("127.0.0.1", 8000)})

    (record,) = caplog.records
    _, url, _, body = shlex.split(record.__dict__["table"])
    if template == "yes":
        assert json.loads(body)["model"] == "Ada's model"
    else:
        assert url == "http://localhost:8000/v2/models/Ada%27s%20model/generate"
