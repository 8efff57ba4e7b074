"""A GGUF model in several files is read as one file; parts that do not fit together are refused."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("torch")
pytest.importorskip("transformers")

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.gguf import TensorData, other_engines, read_gguf
from conch.checkpoints.gguf_reference import GgufReference
from conch.checkpoints.options import Options
from tests.refusals import refused_argument
from tests.unit.checkpoints.gguf_files import LLAMA, TOKENS, content, model, write_model
from tests.unit.checkpoints.gguf_models import model as network
from tests.unit.checkpoints.gguf_models import write
from tests.unit.checkpoints.gguf_splits import split

SCORED = [([3, 4, 5, 6, 7], 3)]


@pytest.mark.parametrize("small_first", [False, True])
def test_parts_are_read_as_one_file(tmp_path: Path, small_first: bool) -> None:
    whole = read_gguf(write(tmp_path / "whole.gguf", "llama", network("llama"), "Q8_0"))
    shutil.copy(whole.path, tmp_path / "m.gguf")
    file = read_gguf(split(tmp_path / "m.gguf", 12, small_first=small_first))

    assert len(file.parts) == 4 + small_first and file.path.name.startswith("m-00001-of-")
    assert file.metadata.items() >= whole.metadata.items()
    assert file.tensors.keys() == whole.tensors.keys()
    data, expected = TensorData(file), TensorData(whole)
    for name, tensor in file.tensors.items():
        assert np.array_equal(data.of(tensor), expected.of(whole.tensors[name])), name
    with ThreadPoolExecutor(1) as pool:
        assert GgufReference(file, pool).score(SCORED) == GgufReference(whole, pool).score(SCORED)
    assert "'transformers'" in other_engines(whole, (), without="") and "'transformers'" not in other_engines(
        file, (), without=""
    )


def test_folder_with_the_parts_of_one_model_is_a_checkpoint(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", TOKENS)
    first = split(tmp_path / "m.gguf", 9)
    (tmp_path / "README.md").touch()
    (tmp_path / "mmproj-m.gguf").write_bytes(content({"general.architecture": "clip", "clip.has_vision_encoder": True}))
    for options in (Options(), Options(model=first.name)):
        found = Checkpoint.open(tmp_path, options)
        assert found.gguf is not None and found.gguf.path == first
        assert found.projector == tmp_path / "mmproj-m.gguf"
        assert {("path", str(path)) for path in found.gguf.parts} <= set(found.dependencies)

    write_model(tmp_path / "other.gguf")
    message = refused_argument(Checkpoint.open, tmp_path, Options())
    assert message.endswith("has 2 GGUF files: set parameter 'model' to one of m-00001-of-00003.gguf, other.gguf")
    assert Checkpoint.open(tmp_path, Options(model=first.name)).projector is None


def test_parts_in_the_cache_of_the_hub_are_links_to_files_with_other_names(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    write_model(tmp_path / "m.gguf")
    first = split(tmp_path / "m.gguf", 9)
    for number, path in enumerate(sorted(tmp_path.glob("m-*.gguf"))):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    for options in (Options(model=str(snapshot)), Options(model=str(snapshot / first.name))):
        found = Checkpoint.open(tmp_path, options)
        assert found.gguf is not None and [path.parent for path in found.gguf.parts] == [snapshot] * 3


SECOND, THIRD = "m-00002-of-00003.gguf", "m-00003-of-00003.gguf"
#: The metadata of a part by itself.
PART = {"split.no": 1, "split.count": 3, "split.tensors.count": 20}


def part(changes: Mapping[str, Any], *tensors: str) -> bytes:
    """The bytes of a part with some vectors."""
    placed = [(name, (32,), 0, 128 * number) for number, name in enumerate(tensors)]
    return content({**PART, **changes}, placed, 128 * len(placed))


@pytest.mark.parametrize(
    ("name", "damaged", "message"),
    [
        (SECOND, None, "m-00001-of-00003.gguf is one of 3 files of a model, and m-00002-of-00003.gguf is missing"),
        (SECOND, b"", "m-00002-of-00003.gguf is not a GGUF file"),
        (SECOND, part({})[:-40], "m-00002-of-00003.gguf is not a GGUF file that can be read: "),
        (
            SECOND,
            part({"split.no": 2}),
            "m-00002-of-00003.gguf is part 3 of 3 of a model, by split.no and split",
        ),
        (SECOND, part({"split.no": 3}), "m-00002-of-00003.gguf is part 4 of 3 of a model, by split.no"),
        (SECOND, part({"split.no": "1"}), "m-00002-of-00003.gguf: split.no must be a whole number"),
        (SECOND, part({"split.count": 2}), "is of another model than {first}: split.count differs"),
        (SECOND, part({"split.tensors.count": 9}), "is of another model than {first}: split.tensors.count differs"),
        (SECOND, part({"general.architecture": "qwen2"}), "than {first}: general.architecture differs"),
        (SECOND, model(), "m-00002-of-00003.gguf is part 1 of 1 of a model, by split.no and split.count, so its name"),
        (SECOND, part({}, "token_embd.weight"), "tensor 'token_embd.weight' is also in another part"),
        (SECOND, part({}, "a", "b"), "the 3 parts of {first} do not have 20 tensors, as split.tensors.count says"),
        (SECOND, part({}, *"abcdefghijklmnopqrstuvw"), "the 3 parts of {first} do not have 20 tensors"),
        (
            SECOND,
            part({}, *(f"blk.1.{n}" for n in range(9))),
            "{first} lacks tensor 'blk.0.attn_norm.weight'",
        ),
        ("m-00001-of-00003.gguf", part({**LLAMA, "split.count": 2**31}), "split.count is 2147483648; at most 1000"),
        ("m-00001-of-00003.gguf", part({**LLAMA, "split.no": 0, "split.count": 2}), "must end with -00001-of-00002"),
        ("m-00001-of-00003.gguf", part(LLAMA), "must end with -00002-of-00003.gguf"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(
    tmp_path: Path, name: str, damaged: bytes | None, message: str
) -> None:
    write_model(tmp_path / "m.gguf")
    first = split(tmp_path / "m.gguf", 9)
    if damaged is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(damaged)
    assert message.format(first=first) in refused_argument(Checkpoint.open, tmp_path, Options())


def test_model_is_opened_by_its_first_part(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf")
    first = split(tmp_path / "m.gguf", 9)
    message = refused_argument(Checkpoint.open, tmp_path, Options(model=SECOND))
    assert message == f"{tmp_path / SECOND} is part 2 of 3 of a model: use the first part, {first.name}"


def test_headers_of_all_parts_together_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "m.gguf")
    split(tmp_path / "m.gguf", 9)
    monkeypatch.setattr("conch.checkpoints.gguf.MOST_HEADER_BYTES", 1700)
    message = refused_argument(Checkpoint.open, tmp_path, Options())
    assert f"{tmp_path / THIRD} is not a GGUF file" in message and "more than 1700 bytes" in message
