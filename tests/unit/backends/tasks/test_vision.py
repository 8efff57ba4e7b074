"""Image classification: the pipeline's labels and scores, on whatever engine, and images that cannot be read."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from conch.backends.base.arrays import Result
from conch.backends.tasks.engines import NetworkEngine
from conch.backends.tasks.task import ExecutionWork, Task
from conch.core.errors import Code, ConchError
from tests import task_checkpoints
from tests.task_checkpoints import image_file
from tests.task_requests import answers, ask, open_task


class Network(NetworkEngine):
    """An engine of plain PyTorch that remembers its runs."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
        self.runs: list[tuple[int, ...]] = []

    precision = "fp32"
    outputs = ("logits",)

    def run(self, arrays: Any, names: Any = ()) -> dict[str, Any]:
        self.runs.append(arrays["pixel_values"].shape)
        assert arrays["pixel_values"].dtype == np.float32
        with torch.inference_mode():
            return {"logits": self.model(torch.from_numpy(arrays["pixel_values"])).logits.numpy()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return task_checkpoints.vit(tmp_path_factory.mktemp("vit"))


@pytest.fixture
def network(folder: Path) -> Network:
    return Network(folder)


@pytest.fixture
def task(folder: Path, network: Network) -> Task:
    heads = []

    def open_engine(head: str) -> Network:
        heads.append(head)
        return network

    made = open_task(folder, open_engine)
    assert heads == ["AutoModelForImageClassification"]
    network.runs.clear()  # what was tried out
    return made


def reference(folder: Path, file: bytes, **options: Any) -> list[tuple[str, float]]:
    make: Any = transformers.pipeline
    classify = make("image-classification", model=str(folder), device="cpu", dtype=torch.float32)
    return [(one["label"], one["score"]) for one in classify(Image.open(BytesIO(file)), **options)]


def ranked(result: Any, row: int = 0) -> list[tuple[str, float]]:
    assert isinstance(result, Result)
    labels, scores = result.outputs["label"], result.outputs["score"]
    columns = scores.shape[1]
    return list(zip(labels.elements[row * columns : (row + 1) * columns], scores[row].tolist(), strict=True))


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_labels_and_scores_are_those_of_the_pipeline(task: Task, folder: Path, format: str) -> None:
    file = image_file(50, 37, seed=4, format=format)
    (result,) = answers(task, ask({"image": [file]}))
    wanted = reference(folder, file)
    assert [label for label, _ in ranked(result)] == [label for label, _ in wanted]
    np.testing.assert_allclose([s for _, s in ranked(result)], [s for _, s in wanted], rtol=1e-4)
    assert "logits" not in result.outputs  # type: ignore[union-attr]


def test_requests_run_together_and_each_has_its_top_k(task: Task, network: Network, folder: Path) -> None:
    files = [image_file(seed=seed) for seed in range(3)]
    usage = ExecutionWork()
    requests = [ask({"image": files[:2]}, ("label", "score", "logits"), top_k=2), ask({"image": files[2:]}, top_k=100)]
    first, second = task.execute([task.prepare(request) for request in requests], usage)
    assert network.runs == [(3, 3, 32, 32)]
    assert (usage.runs, usage.sequences) == (1, 3)
    assert [label for label, _ in ranked(first, 1)] == [label for label, _ in reference(folder, files[1], top_k=2)]
    assert len(ranked(second)) == 7
    assert first.outputs["logits"].shape == (2, 7)  # type: ignore[union-attr]


@pytest.mark.parametrize("problem", ["multi_label_classification", "regression"])
def test_scores_follow_the_problem_of_the_checkpoint(tmp_path: Path, problem: str) -> None:
    folder = task_checkpoints.vit(tmp_path, problem_type=problem)
    network = Network(folder)
    (result,) = answers(open_task(folder, lambda head: network), ask({"image": [image_file()]}))
    wanted = reference(folder, image_file())
    np.testing.assert_allclose([s for _, s in ranked(result)], [s for _, s in wanted], rtol=1e-4)


def test_network_and_labels_that_disagree_are_refused(task: Task, network: Network) -> None:
    network.run = lambda arrays: {"logits": np.zeros((1, 3), np.float32)}  # type: ignore[method-assign]
    with pytest.raises(ConchError, match="the network returns 3 scores, but the checkpoint has 7 labels"):
        answers(task, ask({"image": [image_file()]}))


def test_broken_image_is_refused_with_its_row(task: Task) -> None:
    with pytest.raises(ConchError, match="input 'image' in row 1 cannot be read") as caught:
        task.prepare(ask({"image": [image_file(), image_file()[:60]]}))
    assert caught.value.code is Code.INVALID_ARG


def test_top_k_below_one_is_refused(task: Task) -> None:
    with pytest.raises(ConchError, match="top_k is '0'"):
        task.prepare(ask({"image": [image_file()]}, top_k=0))


def test_image_beyond_the_limit_of_the_configuration_is_refused(folder: Path, network: Network) -> None:
    task = open_task(folder, lambda head: network, max_image_pixels=100)
    with pytest.raises(ConchError, match="40x30 pixels; at most 100 are read"):
        task.prepare(ask({"image": [image_file(40, 30)]}))


def test_checkpoint_without_an_image_processor_is_refused(tmp_path: Path) -> None:
    folder = task_checkpoints.vit(tmp_path)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ConchError) as caught:
        open_task(folder, lambda head: None)
    assert caught.value.code is Code.INVALID_ARG
