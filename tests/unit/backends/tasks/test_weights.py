"""Weights that lack a tensor: refused by name where an answer depends on it, and served where none does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from conch.backends.base.verification import require_tensors
from conch.backends.tasks.engines import open_engine
from conch.backends.tasks.huggingface_backend import make_task
from conch.backends.tasks.task import Task
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.convert.encoder import network
from conch.core.errors import Code, ConchError
from tests import task_checkpoints, text_checkpoints


def without(folder: Path, *endings: str) -> list[str]:
    """Remove the tensors whose names have these endings from a folder's weights, and return their names."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    gone = [name for name in tensors if name.endswith(endings)]
    assert gone
    save_file({name: tensor for name, tensor in tensors.items() if name not in gone}, path, metadata={"format": "pt"})
    return gone


def opened(folder: Path, **options: Any) -> Task:
    """The task as the backend makes it, on PyTorch."""
    checkpoint = Checkpoint.open(folder, Options.from_values(options))
    return make_task(checkpoint, lambda head, part=None: open_engine(part or checkpoint, head=head))


def bert(head: str, **settings: Any) -> Callable[[Path], Path]:
    return lambda folder: text_checkpoints.write(folder, head, **settings)


DEPENDS: list[tuple[Callable[[Path], Path], Sequence[str]]] = [
    (bert("AutoModelForSequenceClassification", num_labels=3), ["pooler.dense.weight"]),
    (bert("AutoModelForSequenceClassification", num_labels=3), ["pooler.dense.weight", "pooler.dense.bias"]),
    (bert("AutoModelForTokenClassification", num_labels=3), ["classifier.weight"]),
    (bert("AutoModelForQuestionAnswering"), ["layer.1.attention.self.value.bias"]),
    (bert("AutoModel"), ["token_type_embeddings.weight"]),
    (task_checkpoints.vit, ["classifier.bias"]),
    (task_checkpoints.sounds, ["projector.weight"]),
    (task_checkpoints.ctc, ["lm_head.weight"]),
    (task_checkpoints.t5, ["decoder.block.1.layer.1.EncDecAttention.q.weight"]),
    (task_checkpoints.whisper, ["encoder.conv2.weight"]),
    (task_checkpoints.detector, ["bbox_predictor.layers.0.weight"]),
]
DOES_NOT: list[tuple[Callable[[Path], Path], Sequence[str]]] = [
    (bert("AutoModel"), ["pooler.dense.weight", "pooler.dense.bias"]),
    (task_checkpoints.sounds, ["masked_spec_embed"]),
    (task_checkpoints.ctc, ["masked_spec_embed"]),
]


@pytest.mark.parametrize(("make", "endings"), DEPENDS, ids=[endings[0] for _, endings in DEPENDS])
def test_what_answers_depend_on_must_be_there(
    tmp_path: Path, make: Callable[[Path], Path], endings: Sequence[str]
) -> None:
    names = without(make(tmp_path), *endings)
    with pytest.raises(ConchError) as refused:
        opened(tmp_path)
    assert refused.value.code is Code.INVALID_ARG
    assert all(name in refused.value.message for name in names), refused.value.message
    assert "set parameter 'task' to what it was trained for" in refused.value.message


@pytest.mark.parametrize(("make", "endings"), DOES_NOT, ids=[endings[0] for _, endings in DOES_NOT])
def test_what_no_answer_depends_on_may_be_missing(
    tmp_path: Path, make: Callable[[Path], Path], endings: Sequence[str]
) -> None:
    without(make(tmp_path), *endings)
    opened(tmp_path)


def test_a_tensor_of_another_shape_is_refused_with_both_shapes(tmp_path: Path) -> None:
    folder = text_checkpoints.write(tmp_path, "AutoModelForSequenceClassification", num_labels=3)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["bert.pooler.dense.bias"] = torch.zeros(7)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ConchError, match=r"bert\.pooler\.dense\.bias, which they have as \[7\] and .* makes \[32\]"):
        opened(folder)


def test_convert_refuses_them_too(tmp_path: Path) -> None:
    folder = text_checkpoints.write(tmp_path, "AutoModelForSequenceClassification", num_labels=3)
    without(folder, "pooler.dense.weight")
    with pytest.raises(ConchError, match=r"lack tensors that its results depend on: bert\.pooler\.dense\.weight;"):
        network.load(Checkpoint.open(folder, Options()))


class _Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        self.down, self.up = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))
        self.register_buffer("counted", torch.tensor(5))
        self.noisy = False

    def forward(self, x: Any) -> Any:
        self.unused(x)
        noise = torch.rand(()) if self.noisy else 0
        return {"scores": self.used(x) + (self.down * self.up).sum() + self.counted + noise, "text": "the same"}


def report(*missing: str) -> dict[str, Any]:
    return {"missing_keys": set(missing), "mismatched_keys": set()}


def required(model: _Layers, *missing: str) -> None:
    x = torch.arange(3.0)
    require_tensors(model, report(*missing), lambda: model(x), "a folder")


def test_tensors_that_matter_only_together_are_named_together() -> None:
    required(_Layers(), "down")
    with pytest.raises(ConchError, match=r"depend on: down, up \(of 4 that are missing\);"):
        required(_Layers(), "down", "unused.bias", "unused.weight", "up")


def test_weights_are_what_they_were_afterwards() -> None:
    model = _Layers()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    required(model, "unused.weight", "unused.bias")
    with pytest.raises(ConchError, match=r"depend on: used\.bias;"):
        required(model, "used.bias")
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_a_network_that_draws_random_numbers_is_judged_by_the_same_ones() -> None:
    model = _Layers()
    model.noisy = True
    required(model, "unused.weight")
    with pytest.raises(ConchError, match=r"depend on: used\.bias \(of 2 that are missing\);"):
        required(model, "unused.weight", "used.bias")


def test_counters_are_not_weights() -> None:
    required(_Layers(), "counted")
    with pytest.raises(ConchError, match=r"depend on: used\.bias;"):
        required(_Layers(), "counted", "used.bias")


def test_where_no_example_runs_every_missing_tensor_counts() -> None:
    def broken() -> Any:
        raise RuntimeError("it needs two images")

    with pytest.raises(ConchError, match=r"unused\.weight, and an example .* failed: it needs two images"):
        require_tensors(_Layers(), report("unused.weight"), broken, "a folder")
