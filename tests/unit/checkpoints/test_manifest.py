"""conch.json: written, read, verified, and refused when it is not what was written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from conch.checkpoints.manifest import FILENAME, Latency, Manifest, Source, Variant, check_name, hashes
from conch.core.errors import Code, ConchError


def latency(mean: float) -> tuple[Latency, ...]:
    return (Latency(1, 16, mean, 0.1, mean, mean, mean, mean, mean),)


def manifest_of(folder: Path, **changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "source": Source("org/name", "abc", {"config.json": "sha256:00"}),
        "task": "feature-extraction",
        "variants": (
            Variant("torch-fp32", "torch", "fp32", latency=latency(4.0), passed=True),
            Variant("onnxruntime-fp32", "onnxruntime", "fp32", "fp32.onnx", latency(2.0), passed=True),
            Variant("onnxruntime-int8", "onnxruntime", "int8", "int8.onnx", latency(1.0), passed=True),
            Variant(
                "openvino-int8",
                "openvino",
                "int8",
                "int8.xml",
                latency(0.5),
                {"logits": {"cosine_min": 0.8}},
                reasons=("logits: cosine 0.80 is below 0.99",),
            ),
        ),
        "auto": "onnxruntime-int8",
        "files": hashes(folder),
        "settings": {"seed": 0},
    }
    return Manifest(**{**values, **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("fp32.onnx", "int8.onnx", "int8.xml", "1_Pooling/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def test_what_was_written_is_read_and_verified(folder: Path) -> None:
    written = manifest_of(folder)
    written.write(folder)

    read = Manifest.read(folder)

    assert read == written
    read.verify(folder)
    assert set(read.files) == {"fp32.onnx", "int8.onnx", "int8.xml", "1_Pooling/config.json"}
    assert json.loads((folder / FILENAME).read_text())["format"] == 1


def test_folder_without_one_has_no_manifest(tmp_path: Path) -> None:
    assert Manifest.read(tmp_path) is None


def test_write_that_fails_leaves_the_old_one(folder: Path) -> None:
    manifest_of(folder).write(folder)
    before = (folder / FILENAME).read_bytes()

    with pytest.raises(TypeError):
        manifest_of(folder, settings={"data": object()}).write(folder)

    assert (folder / FILENAME).read_bytes() == before
    assert [name for name in os.listdir(folder) if name.startswith(".")] == []


def test_changed_file_is_refused_by_name(folder: Path) -> None:
    manifest = manifest_of(folder)
    (folder / "int8.onnx").write_text("something else")

    with pytest.raises(ConchError, match=r"int8\.onnx is not the file that was converted: its hash is") as refused:
        manifest.verify(folder)

    assert refused.value.code is Code.INVALID_ARG


def test_missing_file_is_refused_by_name(folder: Path) -> None:
    manifest = manifest_of(folder)
    (folder / "1_Pooling" / "config.json").unlink()

    with pytest.raises(ConchError, match=r"1_Pooling/config\.json is missing"):
        manifest.verify(folder)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a\\b", "C:x", "a\0b"]
)
def test_name_that_is_not_plain_is_refused(name: str) -> None:
    with pytest.raises(ConchError, match="leads out of the folder or is not a plain name"):
        check_name(name)


@pytest.mark.parametrize("change", ["files", "path"])
def test_manifest_that_names_a_file_elsewhere_is_refused(folder: Path, change: str) -> None:
    document = manifest_of(folder).to_json()
    if change == "files":
        document["files"]["../other"] = "sha256:00"
    else:
        document["variants"][1]["path"] = "/etc/passwd"
    (folder / FILENAME).write_text(json.dumps(document))

    with pytest.raises(ConchError, match="leads out of the folder"):
        Manifest.read(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "has format 2; this version of conch reads format 1"),
        ({"auto": "other"}, "'auto' names the variant 'other', which does not exist"),
        ({"files": {}}, "variant 'onnxruntime-fp32' uses 'fp32.onnx', which has no hash"),
        ({"variants": [{"engine": "torch"}]}, "is not a manifest"),
        ({"variants": 3}, "is not a manifest"),
        ({"files": []}, "is not a manifest"),
        ({"source": None}, "is not a manifest"),
    ],
)
def test_manifest_that_contradicts_itself_is_refused(folder: Path, change: dict[str, Any], message: str) -> None:
    (folder / FILENAME).write_text(json.dumps({**manifest_of(folder).to_json(), **change}))

    with pytest.raises(ConchError, match=message) as refused:
        Manifest.read(folder)

    assert str(folder / FILENAME) in refused.value.message


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_manifest_that_is_no_json_object_is_refused(folder: Path, text: str) -> None:
    (folder / FILENAME).write_bytes(text.encode("latin-1"))

    with pytest.raises(ConchError, match=r"conch\.json (cannot be read|has format None)"):
        Manifest.read(folder)


def test_auto_is_served_unless_something_else_is_asked_for(folder: Path) -> None:
    manifest = manifest_of(folder)

    assert manifest.select().name == "onnxruntime-int8"
    assert manifest.select(engine="torch").name == "torch-fp32"
    assert manifest.select("onnxruntime-fp32").name == "onnxruntime-fp32"


def test_fastest_of_an_engine_is_served_where_auto_is_another_s(folder: Path) -> None:
    assert manifest_of(folder, auto="torch-fp32").select(engine="onnxruntime").name == "onnxruntime-int8"


def test_refused_variant_cannot_be_chosen(folder: Path) -> None:
    with pytest.raises(ConchError, match=r"variant 'openvino-int8' was refused .*cosine 0\.80 is below 0\.99"):
        manifest_of(folder).select("openvino-int8")
    with pytest.raises(ConchError, match="without a usable variant for engine 'openvino'"):
        manifest_of(folder).select(engine="openvino")


def test_forced_variant_can_be_chosen(folder: Path) -> None:
    forced = Variant("openvino-int8", "openvino", "int8", "int8.xml", forced=True)

    assert manifest_of(folder, variants=(forced,), auto="").select("openvino-int8") is forced


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("other", "auto"), "there is no variant 'other'; usable: torch-fp32, onnxruntime-fp32, onnxruntime-int8"),
        (("torch-fp32", "openvino"), "variant 'torch-fp32' runs on engine 'torch', not on 'openvino'"),
    ],
)
def test_choice_that_does_not_exist_is_refused(folder: Path, arguments: tuple[str, str], message: str) -> None:
    with pytest.raises(ConchError, match=message):
        manifest_of(folder).select(*arguments)


def test_manifest_without_a_choice_asks_for_one(folder: Path) -> None:
    with pytest.raises(ConchError, match="chooses no variant; set parameter 'variant'"):
        manifest_of(folder, auto="").select()


@pytest.mark.parametrize("name", ["task", "auto"])
def test_manifest_with_a_number_for_a_text_is_refused(folder: Path, name: str) -> None:
    manifest_of(folder).write(folder)
    document = json.loads((folder / FILENAME).read_text())
    (folder / FILENAME).write_text(json.dumps({**document, name: 5}))
    with pytest.raises(ConchError, match=f"is not a manifest: TypeError: manifest's {name} must be a text"):
        Manifest.read(folder)
