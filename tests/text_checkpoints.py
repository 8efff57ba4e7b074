"""Tiny encoders with random weights and a tokenizer of their own, the engine that runs them, and requests for them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import BertConfig, BertTokenizer, PreTrainedConfig, RobertaConfig, RobertaTokenizer
from transformers.models.auto import modeling_auto

from conch.backends.base.arrays import Array, Request, Result, Strings
from conch.backends.tasks.engines import NetworkEngine
from conch.backends.tasks.huggingface_backend import make_task
from conch.backends.tasks.task import ExecutionWork, Task
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.core.errors import ConchError
from tests.task_requests import tensor

TEXTS: Final = (
    "How can you be sure that the station is open?",
    "I walk to the market.",
    "Anna Smith works at the library in Berlin, near the station, and she takes a bus in the morning.",
    "Hello!",
    "A program takes a list of numbers and returns the even ones, doesn't it?",
)
SPECIAL: Final = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SIZES: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 66,
    # Large enough that random weights tell texts apart.
    "initializer_range": 0.4,
}


def wordpiece(folder: Path) -> BertTokenizer:
    """A tokenizer like BERT's that knows pieces of ``TEXTS``, written to ``folder``."""
    words = sorted({word.strip(".,?!").lower() for text in TEXTS for word in text.split()})
    letters = sorted({letter for word in words for letter in word} - {"'"})
    # Every other word is known, the rest is spelled.
    tokens = [
        *SPECIAL,
        *".,?!':",
        *letters,
        *(f"##{letter}" for letter in letters),
        *(word for word in words[::2] if len(word) > 1),
    ]
    made = BertTokenizer(vocab={token: index for index, token in enumerate(tokens)}, model_max_length=64)
    made.save_pretrained(folder)
    return made


def byte_level(folder: Path) -> RobertaTokenizer:
    """A tokenizer like RoBERTa's, written to ``folder``: words are not marked, offsets may begin with spaces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    parts = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(pair) for pair in parts["merges"]]
    made = RobertaTokenizer(vocab=parts["vocab"], merges=merges, model_max_length=64)
    made.save_pretrained(folder)
    return made


def write(folder: Path, head: str, *, family: str = "bert", **settings: Any) -> Path:
    """A checkpoint for ``head`` (a class of transformers) in ``folder``; ``settings`` go into config.json."""
    tokenizer = wordpiece(folder) if family == "bert" else byte_level(folder)
    architecture: type[PreTrainedConfig] = BertConfig if family == "bert" else RobertaConfig
    config = architecture(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **{**SIZES, **settings})
    torch.manual_seed(7)
    model = getattr(modeling_auto, head).from_config(config)
    # Heads begin with zeros in places, which would hide mistakes.
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(folder)
    return folder


class TorchEngine(NetworkEngine):
    """A network in torch, fp32; remembers the shapes that it ran."""

    name = "torch"
    precision = "fp32"

    def __init__(self, folder: Path, head: str) -> None:
        self.model = getattr(modeling_auto, head).from_pretrained(folder, attn_implementation="eager").eval()
        self.inputs = frozenset({"input_ids", "attention_mask", "token_type_ids"})
        spans = ("start_logits", "end_logits")
        outputs = {"AutoModel": ("last_hidden_state",), "AutoModelForQuestionAnswering": spans}
        self.outputs = outputs.get(head, ("logits",))
        self.shapes: list[tuple[int, ...]] = []

    def run(self, arrays: Mapping[str, Array], names: Collection[str] = ()) -> dict[str, Array]:
        self.shapes.append(arrays["input_ids"].shape)
        with torch.inference_mode():
            given = self.model(**{name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})
        return {name: value.numpy() for name, value in given.items() if isinstance(value, torch.Tensor)}


def open_task(folder: Path, task: str, **options: Any) -> Task:
    """The task over a checkpoint, on :class:`TorchEngine`."""
    checkpoint = Checkpoint.open(folder, Options.from_values({"task": task, **options}))
    engines: list[TorchEngine] = []

    def open_engine(head: str, part: Checkpoint | None = None, **settings: Any) -> TorchEngine:
        engines.append(TorchEngine(checkpoint.directory, head))
        return engines[0]

    made = make_task(checkpoint, open_engine)
    for engine in engines:
        engine.shapes.clear()
    return made


def request(*outputs: str, serial: int = 0, **inputs: Sequence[Any] | Array) -> Request:
    """A request: lists of texts become BYTES ``[rows, n]``, arrays stay as they are."""
    return Request({name: tensor(name, value) for name, value in inputs.items()}, frozenset(outputs), serial=serial)


def answer(task: Task, asked: Request, usage: ExecutionWork | None = None) -> Result:
    """The result of one request alone; an error is raised."""
    [result] = task.execute([task.prepare(asked)], usage or ExecutionWork())
    if isinstance(result, ConchError):
        raise result
    return result


def strings(value: Array | Strings) -> list[list[str]]:
    """A BYTES output as lists of text."""
    assert isinstance(value, Strings)
    width = value.shape[1]
    texts = [element.decode() if isinstance(element, bytes) else element for element in value.elements]
    return [texts[start : start + width] for start in range(0, len(texts), width)]
