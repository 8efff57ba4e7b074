"""Models that embed texts and images, converted for both engines, answer as transformers does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize, Transformer

from conch.convert.run import convert
from conch.core.errors import ConchError
from tests import task_checkpoints
from tests.convert_checkpoints import no_progress, quick_plan
from tests.retrieval_models import close, vectors
from tests.task_checkpoints import image_file
from tests.task_requests import open_model
from tests.text_checkpoints import TEXTS, answer, request
from tests.unit.convert.conftest import leave_pages_empty

FILES = [image_file(40, 30), image_file(64, 64, 1, "JPEG"), image_file(20, 90, 2)]


#: Prints the vectors of a text and of an image by the model in a folder, without PyTorch.
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from pathlib import Path
from conch.backends.base.arrays import Request
from conch.backends.tasks.huggingface_backend import EngineOpener, make_task
from conch.backends.tasks.task import ExecutionWork
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.core.tensors import WireTensor, pack_bytes

folder, text, image = sys.argv[1:]
checkpoint = Checkpoint.open(Path(folder), Options(task="feature-extraction"))
task = make_task(checkpoint, EngineOpener(checkpoint, {"kind": "CPU", "device_id": 0, "count": 1}))
for name, value in (("text_input", text.encode()), ("image", Path(image).read_bytes())):
    tensor = WireTensor(name, "BYTES", (1, 1), pack_bytes([value]))
    [result] = task.execute([task.prepare(Request({name: tensor}, frozenset()))], ExecutionWork())
    print(*result.outputs["embedding"][0])
"""


def saved_clip(folder: Path) -> Path:
    first = Transformer(str(task_checkpoints.clip(folder / "bare")))
    reference: Any = SentenceTransformer(modules=[first, Normalize()], device="cpu", prompts={"query": "the "})
    reference.save(str(folder / "saved"), create_model_card=False)
    return folder / "saved"


def embed(task: Any, **inputs: Any) -> Any:
    return vectors(answer(task, request(**inputs)))


@pytest.mark.parametrize(
    ("make", "files"),
    [
        (saved_clip, ("onnxruntime-fp32.onnx", "openvino-fp32.xml", "openvino-fp32.bin")),
        (task_checkpoints.siglip, ("onnxruntime-fp32.onnx",)),
    ],
)
def test_converted_models_embed_texts_and_images(
    tmp_path: Path, make: Callable[[Path], Path], files: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_pages_empty(monkeypatch)
    source = make(tmp_path / "source")
    for index in range(24):
        (tmp_path / f"{index}.png").write_bytes(image_file(seed=index))
    data = tmp_path / "data.csv"
    data.write_text("image,text\n" + "".join(f"{index}.png,{TEXTS[index % len(TEXTS)]}\n" for index in range(24)))
    names = [file.partition(".")[0] for file in files if not file.endswith(".bin")]
    plan = quick_plan(
        source, tmp_path / "models", task="feature-extraction", backends=("onnx", "openvino")[: len(names)],
        quantize=("none",), batch_sizes=(1,), sequence_lengths=(8,), data=data,
    )  # fmt: skip
    manifest = convert(plan, no_progress).manifest
    assert [(variant.name, variant.passed) for variant in manifest.variants[1:]] == [(name, True) for name in names]
    assert manifest.variants[1].agreement["task"]["name"] == "nDCG@10"
    assert {name for name in manifest.files if name.startswith("images/")} == {f"images/{file}" for file in files}
    converted_folder = tmp_path / "models" / "m" / "1"
    assert not [*converted_folder.glob("*.safetensors")]
    original = open_model(source, task="feature-extraction")
    texts, images = embed(original, text_input=TEXTS), embed(original, image=FILES)
    for variant in names:
        converted = open_model(converted_folder, task="feature-extraction", variant=variant)
        close(embed(converted, text_input=TEXTS), texts)
        close(embed(converted, image=FILES), images)
        mixed = embed(converted, text_input=[TEXTS[0], "", TEXTS[1]], image=[b"", FILES[0], b""])
        close(mixed, np.stack([texts[0], images[0], texts[1]]))

    if make is saved_clip:
        (tmp_path / "image").write_bytes(FILES[0])
        command = [sys.executable, "-c", WITHOUT_TORCH, str(converted_folder), TEXTS[0], str(tmp_path / "image")]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        vectors_without = [np.array(line.split(), np.float32) for line in printed.splitlines()]
        close(np.stack(vectors_without), np.stack([texts[0], images[0]]))


def test_images_of_different_sizes_are_refused(tmp_path: Path) -> None:
    source = task_checkpoints.siglip2(tmp_path / "source")
    plan = quick_plan(source, tmp_path / "models", task="feature-extraction", backends=("onnx",), quantize=("none",))
    with pytest.raises(ConchError, match="cannot be converted, because its images keep their proportions"):
        convert(plan, no_progress)


def test_folder_without_modules_is_refused_with_the_task_that_converts_it(tmp_path: Path) -> None:
    source = task_checkpoints.clip(tmp_path / "source")
    with pytest.raises(ConchError, match=r"'zero-shot-image-classification' .*; --task feature-extraction converts it"):
        convert(quick_plan(source, tmp_path / "models"), no_progress)
