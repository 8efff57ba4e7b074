"""Models that embed texts and images answer as sentence-transformers and transformers do over the same folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import Normalize, Transformer

from conch.backends.base.arrays import Array
from conch.backends.tasks.huggingface_backend import describe_task
from conch.backends.tasks.task import ExecutionWork, Task
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.core.errors import ConchError
from tests import task_checkpoints
from tests.retrieval_models import close, completed, token_vectors, vectors
from tests.task_checkpoints import image_file
from tests.task_requests import open_model
from tests.text_checkpoints import request

TEXTS = ["a bus", "Where is the nearest library?", "Hello!", "the station is open in the morning"]
FILES = [image_file(40, 30), image_file(64, 64, 1, "JPEG"), image_file(20, 90, 2), image_file(32, 32, 3, mode="L")]


def picture(file: bytes) -> Any:
    return Image.open(BytesIO(file)).convert("RGB")


def embed(model: Task, *rows: str | bytes, **inputs: str) -> Array:
    """The vectors of texts and images, as one request."""
    return run(model, [rows], **inputs)[0]


def run(model: Task, requests: Sequence[Sequence[str | bytes]], **inputs: str) -> list[Array]:
    """The vectors of requests that run together, each of texts and images."""
    prepared = []
    for rows in requests:
        tensors: dict[str, Any] = {name: [value] * len(rows) for name, value in inputs.items()}
        if any(type(row) is str for row in rows):
            tensors["text_input"] = [row if type(row) is str else "" for row in rows]
        if any(type(row) is bytes for row in rows):
            tensors["image"] = [row if type(row) is bytes else b"" for row in rows]
        prepared.append(model.prepare(request(**tensors)))
    return [vectors(result) for result in completed(model.execute(prepared, ExecutionWork()))]


def check(task: Task, texts: Array, images: Array) -> None:
    """The vectors are ``texts`` and ``images``, alone, among neighbours and in one request with both."""
    for rows, expected in ((TEXTS, texts), (FILES, images)):
        close(np.concatenate([embed(task, row) for row in rows]), expected)
        close(embed(task, *rows), expected)
    mixed = [row for pair in zip(TEXTS, FILES, strict=True) for row in pair]
    wanted = np.stack([row for pair in zip(texts, images, strict=True) for row in pair])
    close(embed(task, *mixed), wanted)
    close(np.concatenate(run(task, [[row] for row in mixed])), wanted)


@pytest.mark.parametrize("make", [task_checkpoints.clip, task_checkpoints.align, task_checkpoints.chinese_clip])
def test_saved_by_sentence_transformers(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    first = Transformer(str(make(tmp_path / "bare")))
    folder = tmp_path / "folder"
    reference: Any = SentenceTransformer(modules=[first, Normalize()], device="cpu", prompts={"query": "the "})
    reference.save(str(folder), create_model_card=False)
    task = open_model(folder)
    images = np.stack([reference.encode(picture(file)) for file in FILES])
    check(task, np.stack([reference.encode(text) for text in TEXTS]), images)
    close(embed(task, TEXTS[1], task="query"), [reference.encode_query(TEXTS[1])])
    close(embed(task, FILES[1], task="query"), images[1:2])


def test_older_clip_module_in_a_folder(tmp_path: Path) -> None:
    task_checkpoints.clip(tmp_path / "0_CLIPModel")
    listed = [{"idx": 0, "name": "0", "path": "0_CLIPModel", "type": "sentence_transformers.models.CLIPModel"}]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    reference: Any = SentenceTransformer(str(tmp_path), device="cpu")
    texts = np.stack([reference.encode(text) for text in TEXTS])
    check(open_model(tmp_path), texts, np.stack([reference.encode(picture(file)) for file in FILES]))


@pytest.mark.parametrize("make", [task_checkpoints.clip, task_checkpoints.siglip, task_checkpoints.siglip2])
def test_bare_folder(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    model: Any = transformers.AutoModel.from_pretrained(make(tmp_path)).eval()
    processor: Any = transformers.AutoProcessor.from_pretrained(tmp_path)
    length = model.config.text_config.max_position_embeddings
    padding = {} if make is task_checkpoints.clip else {"padding": "max_length", "max_length": length}
    with torch.inference_mode():
        texts = [
            model.get_text_features(**processor(text=[text], return_tensors="pt", truncation=True, **padding))
            for text in TEXTS
        ]
        images = [model.get_image_features(**processor(images=[picture(file)], return_tensors="pt")) for file in FILES]
    found = [np.concatenate([output.pooler_output.numpy() for output in outputs]) for outputs in (texts, images)]
    task = open_model(tmp_path, task="feature-extraction")
    check(task, *found)
    described = describe_task(Checkpoint.open(tmp_path, Options(task="feature-extraction")))
    assert described.outputs[0].dims == (found[0].shape[1],)
    assert [spec.name for spec in described.inputs if spec.optional] == ["text_input", "image"]


def test_saved_siglip_pads_texts_as_its_folder_says(tmp_path: Path) -> None:
    for name, settings in (("alone", {}), ("filled", {"text": {"padding": "max_length", "max_length": 16}})):
        first = Transformer(str(task_checkpoints.siglip(tmp_path / "bare")), processing_kwargs=settings)
        reference: Any = SentenceTransformer(modules=[first], device="cpu")
        reference.save(str(tmp_path / name), create_model_card=False)
        texts = np.stack([reference.encode(text) for text in TEXTS])
        check(open_model(tmp_path / name), texts, np.stack([reference.encode(picture(file)) for file in FILES]))


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return open_model(task_checkpoints.clip(tmp_path_factory.mktemp("clip")), task="feature-extraction")


@pytest.mark.parametrize(
    ("inputs", "refusal"),
    [
        ({"image": [b"GIF of nothing"]}, "input 'image' in row 0 cannot be read: it is not an image"),
        ({"image": [image_file(), b""]}, "row 1 has neither a text nor an image"),
        ({"image": [b""], "text_input": [""]}, "row 0 has neither a text nor an image"),
        ({"image": [image_file()], "text_input": ["a bus"]}, "row 0 has both a text and an image"),
        ({"prompt_name": ["a"]}, "input 'text_input' is missing"),
    ],
)
def test_rows_without_one_input_are_refused(clip: Task, inputs: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ConchError, match=refusal):
        clip.prepare(request(**inputs))


def test_image_runs_have_one_shape_and_the_tokens_of_a_batch(tmp_path: Path) -> None:
    task = open_model(task_checkpoints.siglip2(tmp_path), task="feature-extraction", max_batch_tokens=512)
    prepared = [task.prepare(request(image=[file])) for file in FILES]
    work = ExecutionWork()
    completed(task.execute(prepared, work))
    assert (work.sequences, work.runs, work.padded) == (4, 2, 1024)


def pages(model: Task, requests: Sequence[Sequence[str | bytes]], **inputs: str) -> list[Array]:
    """The vectors of each row of requests that run together."""
    prepared = []
    for rows in requests:
        name = "text_input" if type(rows[0]) is str else "image"
        prepared.append(model.prepare(request(**{name: list(rows)}, **{key: [value] for key, value in inputs.items()})))
    return token_vectors(completed(model.execute(prepared, ExecutionWork())))


@pytest.mark.parametrize("saves", [True, False], ids=["saved", "bare"])
@pytest.mark.parametrize(
    "make",
    [task_checkpoints.colpali, task_checkpoints.colqwen2, partial(task_checkpoints.colqwen2, kind="qwen2_5_vl")],
    ids=["colpali", "colqwen2", "colqwen2.5"],
)
def test_pages_of_documents(tmp_path: Path, make: Callable[[Path], Path], saves: bool) -> None:
    folder = make(tmp_path / "bare")
    reference: Any = MultiVectorEncoder(str(folder), device="cpu")
    if saves:
        folder = tmp_path / "saved"
        reference.save(str(folder), create_model_card=False)
    task = open_model(folder)
    files = [*FILES, image_file(40, 30, 4)]
    expected = [reference.encode_document(picture(file)).numpy() for file in files]
    queries = [reference.encode_query(text).numpy() for text in TEXTS]
    for found, wanted in (
        (pages(task, [files]), expected),
        (pages(task, [[file] for file in files]), expected),
        (pages(task, [[text] for text in TEXTS], task="query"), queries),
        (pages(task, [[files[0]], [TEXTS[0]], [files[4]]]), [expected[0], queries[0], expected[4]]),
    ):
        for own, other in zip(found, wanted, strict=True):
            assert own.shape == other.shape
            close(own, other)
