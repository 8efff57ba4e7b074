"""Where a model comes from: a folder, the Hub's cache, or the Hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.hub import Location, named_path, resolve
from conch.checkpoints.options import Options
from conch.core.errors import Code, ConchError
from tests.refusals import refused
from tests.unit.checkpoints.fake_hub import COMMIT, FakeHub
from tests.unit.checkpoints.folders import WEIGHTS, checkpoint
from tests.unit.checkpoints.gguf_files import write_model

FILES = {
    "config.json": b'{"model_type": "bert", "architectures": ["BertModel"]}',
    "tokenizer.json": b"{}",
    "README.md": b"# A model",
    "modeling.py": b"raise SystemExit",
    "model.safetensors": WEIGHTS,
    "model.fp16.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickle",
    "tf_model.h5": b"h5",
    "onnx/model.onnx": b"onnx",
    "openvino/openvino_model.xml": b"xml",
    "openvino/openvino_model.bin": b"bin",
}


@pytest.fixture
def version(tmp_path: Path) -> Path:
    directory = tmp_path / "model" / "1"
    directory.mkdir(parents=True)
    return directory


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    for name in ("HF_TOKEN", "PRIVATE_REPO_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with FakeHub({"org/name": dict(FILES)}).listening() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "shared"))
        yield hub


def refusal(version: Path, options: Options) -> ConchError:
    error = refused(resolve, version, options)
    assert "\n" not in error.message
    return error


def test_version_directory_is_the_model_where_nothing_else_is_named(version: Path) -> None:
    assert resolve(version, Options()) == Location(version, str(version))


@pytest.mark.parametrize("place", ["model/1/weights", "model/weights"])
def test_relative_folder_is_found_beside_the_version_and_beside_the_model(version: Path, place: str) -> None:
    folder = version.parent.parent / place
    folder.mkdir()

    assert resolve(version, Options(model="weights")).folder == folder


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("model/1", "adapter"),
        ("model", "adapter"),
        ("model", "$$TRITON_MODEL_DIRECTORY/adapter"),
        ("cache", "adapter"),
    ],
)
def test_file_of_a_parameter_is_found_beside_the_model_even_if_the_checkpoint_is_elsewhere(
    version: Path, place: str, text: str
) -> None:
    adapter = version.parent.parent / place / "adapter"
    adapter.mkdir(parents=True)

    assert named_path("lora_modules", text, version, version.parent.parent / "cache") == adapter


@pytest.mark.parametrize("text", ["nowhere", "/nowhere", "~nobody/adapter", "a" * 5000, "nul\0"])
def test_file_of_a_parameter_that_does_not_exist_is_refused(version: Path, text: str) -> None:
    with pytest.raises(ConchError, match=r"parameter 'chat_template' names .*, which does not exist") as refused:
        named_path("chat_template", text, version, version)
    assert refused.value.code is Code.INVALID_ARG


def test_folder_may_be_given_from_the_model_s_directory(version: Path) -> None:
    (version.parent / "weights").mkdir()

    location = resolve(version, Options(model="$$TRITON_MODEL_DIRECTORY/weights"))

    assert location.folder == version.parent / "weights"


@pytest.mark.parametrize("model", ["/nowhere/at/all", "./nowhere", "../nowhere"])
def test_folder_that_does_not_exist_is_not_looked_for_on_the_hub(version: Path, model: str) -> None:
    assert refusal(version, Options(model=model)).message == f"model folder '{model}' does not exist"


@pytest.mark.parametrize("model", ["a/b/c", "org/na me", "org/..", "org/a--b", "http://host/x"])
def test_text_that_is_neither_folder_nor_id_is_refused(version: Path, model: str) -> None:
    error = refusal(version, Options(model=model))
    assert error.message == (
        f"model '{model}' is neither a folder, a .gguf file nor an id on the Hugging Face Hub (org/name)"
    )
    assert error.code is Code.INVALID_ARG


def test_model_file_names_model_revision_and_task(version: Path, hub: FakeHub) -> None:
    (version / "model.json").write_text(
        '{"model": "org/name", "revision": "main", "task": "fill-mask", "max_length": 9}'
    )

    opened = Checkpoint.open(version, Options())

    assert (opened.source, opened.revision, opened.task, opened.max_length) == ("org/name", COMMIT, "fill-mask", 9)
    assert opened.dependencies == [("revision", f"org/name@{COMMIT}")]
    assert opened.options.revision == "main"


@pytest.mark.parametrize("text", ["", "[]", '"org/name"', "{"])
def test_broken_model_file_is_refused_by_name(version: Path, text: str) -> None:
    (version / "model.json").write_text(text)

    with pytest.raises(ConchError, match=r"model\.json (cannot be read|must hold a JSON object)"):
        Checkpoint.open(version, Options())


def test_safetensors_are_fetched_and_no_other_weights(version: Path, hub: FakeHub) -> None:
    location = resolve(version, Options(model="org/name"))

    assert sorted(hub.fetched) == ["README.md", "config.json", "model.safetensors", "tokenizer.json"]
    assert (location.folder / "model.safetensors").read_bytes() == WEIGHTS


def test_pickled_weights_are_fetched_where_there_are_no_others(version: Path, hub: FakeHub) -> None:
    del hub.files["org/name"]["model.safetensors"]
    del hub.files["org/name"]["model.fp16.safetensors"]

    resolve(version, Options(model="org/name"))

    assert "pytorch_model.bin" in hub.fetched


@pytest.mark.parametrize(
    ("engine", "weights"),
    [
        ("onnxruntime", {"onnx/model.onnx"}),
        ("openvino", {"openvino/openvino_model.xml", "openvino/openvino_model.bin"}),
    ],
)
def test_engine_decides_which_weights_are_fetched(version: Path, hub: FakeHub, engine: str, weights: set[str]) -> None:
    opened = Checkpoint.open(version, Options(model="org/name", engine=engine))

    assert set(hub.fetched) == {"README.md", "config.json", "tokenizer.json", *weights}
    assert opened.graph_file(engine) is not None


def test_code_is_fetched_only_when_it_is_trusted(version: Path, hub: FakeHub) -> None:
    resolve(version, Options(model="org/name"))
    assert "modeling.py" not in hub.fetched

    resolve(version, Options(model="org/name", trust_remote_code=True))
    assert "modeling.py" in hub.fetched


GGUF = {
    name: name.encode()
    for name in (
        "README.md",
        "Name-Q4_K_M.gguf",
        "Name-Q8_0.gguf",
        "Name-UD-Q8_0.gguf",
        "BF16/Name-BF16-00001-of-00002.gguf",
        "BF16/Name-BF16-00002-of-00002.gguf",
        "mmproj-BF16.gguf",
        "mmproj-F16.gguf",
    )
}


@pytest.mark.parametrize(
    ("model", "options", "fetched"),
    [
        ("org/name", {}, ["Name-Q4_K_M.gguf", "mmproj-F16.gguf"]),
        ("org/name:q4_k_m", {"extra": {"mmproj": "mmproj-BF16.gguf"}}, ["Name-Q4_K_M.gguf", "mmproj-BF16.gguf"]),
        ("org/name:Q8_0", {"engine": "openvino"}, ["Name-Q8_0.gguf"]),
        ("org/name:UD-Q8_0", {"engine": "openvino"}, ["Name-UD-Q8_0.gguf"]),
        ("org/name:Name-UD-Q8_0", {"engine": "openvino"}, ["Name-UD-Q8_0.gguf"]),
        (
            "org/name:BF16",
            {"engine": "llamacpp"},
            ["BF16/Name-BF16-00001-of-00002.gguf", "BF16/Name-BF16-00002-of-00002.gguf", "mmproj-F16.gguf"],
        ),
    ],
)
def test_one_gguf_file_and_one_projector_are_fetched(
    version: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, model: str, options: Any, fetched: list[str]
) -> None:
    hub.files["org/name"] = dict(GGUF)

    location = resolve(version, Options(model=model, **options))

    assert sorted(hub.fetched) == sorted([*fetched, "README.md"])
    assert location.gguf == location.folder / fetched[0]
    assert location.projector == (location.folder / fetched[-1] if "mmproj" in fetched[-1] else None)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert resolve(version, Options(model=model, **options)) == location
    assert resolve(version, Options(model=model, offline=True, **options)) == location


@pytest.mark.parametrize(
    ("model", "files", "message"),
    [
        (
            "org/name:Q2_K",
            GGUF,
            "model 'org/name' has no GGUF file of type 'Q2_K': use 'org/name:BF16' or 'org/name:Q4_K_M' or "
            "'org/name:Q8_0' or 'org/name:UD-Q8_0'",
        ),
        (
            "org/name:Q8_0",
            {"a-Q8_0.gguf": b"", "b-Q8_0.gguf": b""},
            "model 'org/name' has 2 GGUF files: use 'org/name:a-Q8_0' or 'org/name:b-Q8_0'",
        ),
        (
            "org/name",
            {"a-Q5_0.gguf": b"", "a-Q5_1.gguf": b""},
            "model 'org/name' has 2 GGUF files: use 'org/name:Q5_0' or 'org/name:Q5_1'",
        ),
        ("org/name:Q8_0", FILES, "model 'org/name' has no GGUF file of type 'Q8_0'"),
    ],
)
def test_gguf_file_that_is_not_offered_once_is_refused(
    version: Path, hub: FakeHub, model: str, files: dict[str, bytes], message: str
) -> None:
    hub.files["org/name"] = dict(files)

    error = refusal(version, Options(model=model))

    assert error.message == message
    assert error.code is Code.INVALID_ARG
    assert not [name for name in hub.fetched if name.endswith(".gguf")]


def test_gguf_file_that_is_not_cached_is_refused_offline(
    version: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files["org/name"] = dict(GGUF)
    resolve(version, Options(model="org/name"))
    assert "offline mode is on" in refusal(version, Options(model="org/name:Q8_0", offline=True)).message
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    error = refusal(version, Options(model="org/name:Q8_0"))
    assert error.message.startswith("model 'org/name:Q8_0' is not complete in the Hub's cache")
    assert error.code is Code.UNAVAILABLE


def test_only_gguf_file_is_fetched_whatever_its_type(version: Path, hub: FakeHub, tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf")
    hub.files["org/name"] = {"original/m.bf16.gguf": (tmp_path / "m.gguf").read_bytes()}

    opened = Checkpoint.open(version, Options(model="org/name"))

    assert opened.task == "text-generation"
    assert opened.dependencies == [("revision", f"org/name@{COMMIT}")]


def test_gguf_file_beside_other_weights_is_fetched_only_if_it_is_named(version: Path, hub: FakeHub) -> None:
    hub.files["org/name"]["m-Q8_0.gguf"] = b"GGUF"
    assert resolve(version, Options(model="org/name", engine="llamacpp")).gguf is not None
    assert resolve(version, Options(model="org/name")).gguf is None
    assert resolve(version, Options(model="org/name:Q8_0")).gguf is not None


def test_cache_may_be_the_model_s_own(version: Path, hub: FakeHub) -> None:
    location = resolve(version, Options(model="org/name", cache_dir="cache"))

    assert location.folder.is_relative_to(version.parent / "cache")


def test_cached_model_is_served_while_the_hub_is_away(
    version: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    online = resolve(version, Options(model="org/name"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")

    assert resolve(version, Options(model="org/name")) == online
    assert resolve(version, Options(model="org/name", offline=True)) == online


def test_offline_mode_without_a_copy_is_refused(version: Path, hub: FakeHub, tmp_path: Path) -> None:
    error = refusal(version, Options(model="org/name", offline=True))

    assert error.message.startswith(
        f"model 'org/name' is not complete in the Hub's cache at {tmp_path / 'shared'}, and offline mode is on"
    )
    assert error.code is Code.UNAVAILABLE
    assert hub.fetched == []


def test_hub_away_without_a_copy_is_refused(version: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")

    error = refusal(version, Options(model="org/name"))

    assert error.message.endswith("and the Hub cannot be reached")
    assert error.code is Code.UNAVAILABLE


def test_model_that_does_not_exist_is_refused(version: Path, hub: FakeHub) -> None:
    error = refusal(version, Options(model="org/other"))

    assert error.message.startswith("model 'org/other' does not exist on the Hugging Face Hub, or it is private")
    assert error.code is Code.INVALID_ARG


def test_revision_that_does_not_exist_is_refused(version: Path, hub: FakeHub) -> None:
    error = refusal(version, Options(model="org/name", revision="v9"))

    assert error.message == "model 'org/name' has no revision 'v9' on the Hugging Face Hub"


def test_gated_model_is_refused(version: Path, hub: FakeHub) -> None:
    hub.gated.add("org/name")

    assert refusal(version, Options(model="org/name")).message.startswith("model 'org/name' is gated: accept its")


@pytest.mark.parametrize("variable", ["HF_TOKEN", "PRIVATE_REPO_TOKEN"])
def test_private_model_needs_a_token(
    version: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    hub.private["org/name"] = "token-of-a-test"
    assert "or it is private" in refusal(version, Options(model="org/name")).message

    monkeypatch.setenv(variable, "token-of-a-test")

    assert resolve(version, Options(model="org/name")).revision == COMMIT


def test_folder_of_that_name_goes_before_the_hub(version: Path, hub: FakeHub) -> None:
    checkpoint(version.parent / "org" / "name")

    assert resolve(version, Options(model="org/name")).revision == ""
    assert hub.fetched == []


@pytest.mark.parametrize(
    ("model", "reason"),
    [("m" * 300, "File name too long"), ("~nobody-has-this-name/model", "Could not determine home directory.")],
)
def test_a_name_that_no_folder_can_have_is_refused(version: Path, model: str, reason: str) -> None:
    with pytest.raises(ConchError, match="cannot be opened: ") as error:
        resolve(version, Options(model=model))
    assert error.value.code is Code.INVALID_ARG
    assert error.value.message.endswith(reason) and len(error.value.message) < 200
