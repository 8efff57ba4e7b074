"""Networks that padding or neighbours change, and what they are given: each text gets the answer that it gets alone."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto

from conch.backends.base.arrays import Result
from conch.backends.tasks.encoders.encoder_task import EncoderTask, Sharing
from conch.backends.tasks.engines import TorchEngine, open_engine
from conch.backends.tasks.huggingface_backend import make_task
from conch.backends.tasks.task import ExecutionWork
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.convert.encoder import network
from conch.core.errors import ConchError
from conch.core.lengths import equal_runs
from tests.checkpoints import END, train_tokenizer
from tests.text_checkpoints import SIZES, TEXTS, request, wordpiece

HEAD = "AutoModelForSequenceClassification"
#: Of networks whose tokens have no types, so that they take types for words.
GPT: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "ctrl": {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 64},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
}
LEAKY: dict[str, dict[str, Any]] = {
    "fnet": {**SIZES},
    "nystromformer": {**SIZES},
    "convbert": {**SIZES, "embedding_size": 32, "head_ratio": 2},
}


def gpt(folder: Path, kind: str, *, pad: bool = True, **settings: Any) -> Path:
    tokenizer = train_tokenizer()
    tokenizer.padding_side = "right"
    if pad:
        tokenizer.pad_token = END
    tokenizer.save_pretrained(folder)
    known = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    return _write(folder, kind, **{"vocab_size": len(tokenizer), **known, **GPT[kind], **settings})


def leaky(folder: Path, kind: str) -> Path:
    tokenizer = wordpiece(folder)
    return _write(folder, kind, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **LEAKY[kind])


def _write(folder: Path, kind: str, **settings: Any) -> Path:
    torch.manual_seed(3)
    config = transformers.CONFIG_MAPPING[kind](**{"initializer_range": 0.4, "num_labels": 3, **settings})
    model = getattr(modeling_auto, HEAD).from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3) if parameter.dim() > 1 else None
    model.save_pretrained(folder)
    return folder


def opened(folder: Path, **options: Any) -> EncoderTask:
    checkpoint = Checkpoint.open(folder, Options.from_values(options))
    task = make_task(checkpoint, lambda head: open_engine(checkpoint, head=head))
    assert isinstance(task, EncoderTask) and isinstance(task.engine, TorchEngine)
    return task


def alone(folder: Path) -> list[Any]:
    """What transformers answers to each of ``TEXTS``."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    model = getattr(modeling_auto, HEAD).from_pretrained(folder).eval()
    with torch.inference_mode():
        return [model(**tokenizer(text, return_tensors="pt")).logits.numpy() for text in TEXTS]


def together(task: EncoderTask) -> tuple[list[Any], ExecutionWork]:
    """What the task answers to them as one batch, and the work that this was."""
    work = ExecutionWork()
    prepared = [task.prepare(request("logits", text_input=[text])) for text in TEXTS]
    answers = task.execute(prepared, work)
    assert all(isinstance(answer, Result) for answer in answers), answers
    return [answer.outputs["logits"] for answer in answers if isinstance(answer, Result)], work


def check(folder: Path, sharing: Sharing) -> ExecutionWork:
    task = opened(folder)
    assert task.sharing is sharing
    assert task.limits.get("batches", "padded") == sharing.value
    found, work = together(task)
    for one, wanted in zip(found, alone(folder), strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-4, atol=1e-4)
    return work


@pytest.mark.parametrize("kind", GPT)
def test_types_that_the_tokenizer_never_gives_are_not_made_up(tmp_path: Path, kind: str) -> None:
    check(gpt(tmp_path, kind), Sharing.PADDED)


def test_a_converted_network_takes_no_types_that_the_tokenizer_never_gives(tmp_path: Path) -> None:
    loaded = network.load(Checkpoint.open(gpt(tmp_path, "gpt2"), Options()))
    assert loaded.inputs == ("input_ids", "attention_mask")


@pytest.mark.parametrize("kind", LEAKY)
def test_a_network_that_padding_changes_is_given_none(tmp_path: Path, kind: str) -> None:
    work = check(leaky(tmp_path, kind), Sharing.EQUAL)
    assert work.padded == work.tokens


def test_a_network_that_takes_one_row_at_a_time_gets_one(tmp_path: Path) -> None:
    work = check(gpt(tmp_path, "gpt2", pad=False, pad_token_id=None), Sharing.ALONE)
    assert work.runs == len(TEXTS)


def test_texts_of_one_length_share_runs_within_the_budget() -> None:
    lengths = [5, 3, 5, 5, 3, 9]
    assert equal_runs(lengths, budget=10) == [[5], [0, 2], [3], [1, 4]]
    assert equal_runs(lengths, budget=100) == [[5], [0, 2, 3], [1, 4]]
    assert equal_runs(lengths, budget=100, limit=1) == [[5], [0], [2], [3], [1], [4]]


def test_a_model_whose_tokens_are_not_those_of_transformers_is_refused_unless_told(tmp_path: Path) -> None:
    """transformers' class makes one of the vocabulary and ``do_lower_case``, whatever tokenizer.json says."""
    folder = leaky(tmp_path, "convbert")
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"lowercase": true', '"lowercase": false'))
    with pytest.raises(
        ConchError,
        match=r"results differ from those of transformers: .+ by tokenizer\.json; set parameter 'verify_on_load'",
    ):
        opened(folder)
    opened(folder, verify_on_load=False)


def test_a_network_whose_answer_is_another_than_transformers_gives_is_refused(tmp_path: Path) -> None:
    class Drifting(TorchEngine):
        def reference(self, arrays: Any) -> Any:
            return {name: array * 1.001 for name, array in super().reference(arrays).items()}

    folder = gpt(tmp_path, "gpt2")
    for verify in (True, False):
        checkpoint = Checkpoint.open(folder, Options(verify_on_load=verify))
        with pytest.raises(ConchError, match=r"differ by 0\.001 of the greatest") if verify else nullcontext():
            make_task(checkpoint, lambda head: Drifting(folder, head))
