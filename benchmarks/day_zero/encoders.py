"""Compares scores of networks that run in one pass: from conch's task, and from transformers' own network.

The worker's code for a bare folder runs six requests of different lengths, one after the other and all in one batch;
transformers runs each alone, in FP32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.day_zero.outcome import Outcome
from conch.backends.base.arrays import DTYPES, Request, Result, Strings
from conch.backends.tasks.classification import apply, default_function
from conch.backends.tasks.encoders.question_answering import answers, windows
from conch.backends.tasks.huggingface_backend import EngineOpener, make_task
from conch.backends.tasks.task import ExecutionWork, Task
from conch.checkpoints.activations import softmax
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.checkpoints.tokenizers.inputs import open_encoder
from conch.core.errors import ConchError, one_line
from conch.core.tensors import WireTensor, pack_bytes

TEXTS: Final = (
    "Where is the nearest library?",
    "Hello!",
    "I am going to the market in the morning. How can you be sure that the station is open?",
    "A program takes a list of numbers",
    "Anna Smith works at the library in Berlin,",
    "The station",
)
#: The names of the tasks in conch and in transformers' pipelines.
PIPELINES: Final[Mapping[str, str]] = {
    "sequence-classification": "text-classification",
    "token-classification": "token-classification",
    "question-answering": "question-answering",
    "masked": "fill-mask",
    "image-classification": "image-classification",
    "audio-classification": "audio-classification",
}
QUESTION: Final = "Where is the library?"
#: The sizes of the images (pixels) and of the recordings (samples).
SIZES: Final = ((64, 48), (32, 32), (80, 40), (64, 64), (100, 30), (64, 48))
LENGTHS: Final = (16000, 9000, 24000, 12345, 16000, 20000)
#: Tolerance for the difference of a score from transformers'.
BOUND: Final = 2e-4

#: The tensors of a request, and its result: the numbers to compare, by name.
Inputs = Mapping[str, Any]
Numbers = dict[str, float]


def compare_encoder(folder: Path, task: str) -> Outcome:
    """Compare the checkpoint in ``folder``, for ``task`` (a key of ``checkpoints.TASKS``)."""
    import torch

    torch.manual_seed(0)
    try:
        references = REFERENCES[task](folder)
    except Exception as error:
        return Outcome("none", f"transformers: {type(error).__name__}: {one_line(error)[:200]}")
    try:
        checkpoint = Checkpoint.open(folder, Options(threads=1))
        if checkpoint.task != PIPELINES[task]:  # other tasks use this architecture more often
            checkpoint = Checkpoint.open(folder, Options(threads=1, task=PIPELINES[task]))
        served = make_task(checkpoint, EngineOpener(checkpoint, {"kind": "CPU", "device_id": 0, "count": 1}))
    except ConchError as error:
        return Outcome("refused", error.message)
    try:
        requests = [_request(inputs) for inputs, _ in references]
        alone = [result for request in requests for result in _answers(served, [request])]
        together = _answers(served, requests)
    except Exception as error:
        return Outcome("fails", f"{type(error).__name__}: {one_line(error)[:200]}")
    for way, results in (("alone", alone), ("together", together)):
        for index, (result, (_, expected)) in enumerate(zip(results, references, strict=True)):
            if isinstance(result, ConchError):
                return Outcome("fails", f"{way}, request {index}: {result.message}")
            if reason := _difference(SCORES[task](checkpoint, result), expected):
                again = REFERENCES[task](folder)[index][1]
                if _difference(again, expected):
                    return Outcome("none", "transformers itself answers otherwise each time")
                return Outcome("differs", f"{way}, request {index}: {reason}")
    return Outcome("exact")


def _answers(served: Task, requests: Sequence[Request]) -> list[Result | ConchError]:
    return served.execute([served.prepare(request) for request in requests], ExecutionWork())


def _difference(actual: Numbers, expected: Numbers) -> str:
    if missing := sorted(actual.keys() - expected.keys()):
        return f"'{missing[0]}' is not among what transformers gives"
    name, apart = max(((name, abs(actual[name] - expected[name])) for name in actual), key=lambda pair: pair[1])
    return "" if apart <= BOUND else f"{name} is {actual[name]:.5f} and not {expected[name]:.5f}"


def _request(inputs: Inputs) -> Request:
    return Request({name: _tensor(name, value) for name, value in inputs.items()}, frozenset(("logits",)))


def _tensor(name: str, value: Any) -> WireTensor:
    if isinstance(value, np.ndarray):
        datatype = next(known for known, dtype in DTYPES.items() if dtype == value.dtype and known != "BF16")
        return WireTensor(name, datatype, value.shape, value.tobytes())
    return WireTensor(name, "BYTES", (1, 1), pack_bytes([value if isinstance(value, bytes) else value.encode()]))


# ── results of transformers: for each request its tensors, and its numbers by name ────────────────────────────────────


def _network(folder: Path, head: str) -> tuple[Any, Any]:
    import torch
    import transformers

    network: Any = getattr(transformers, head).from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)

    def compute(*texts: str) -> tuple[list[int], Any]:
        encoded = tokenizer(*texts, return_tensors="pt")
        with torch.inference_mode():
            return encoded["input_ids"][0].tolist(), network(**encoded)

    return tokenizer, compute


def _classified(folder: Path) -> list[tuple[Inputs, Numbers]]:
    _, compute = _network(folder, "AutoModelForSequenceClassification")
    return [({"text_input": text}, _by_class(folder, compute(text)[1].logits)) for text in TEXTS]


def _labels(folder: Path, count: int) -> list[str]:
    """Return the names of the classes, in order."""
    names = _config(folder).get("id2label") or {}
    return [names.get(str(index), f"LABEL_{index}") for index in range(count)]


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    return config


def _by_class(folder: Path, logits: Any) -> Numbers:
    logits = logits.numpy()
    (scores,) = apply(default_function(_config(folder), logits.shape[1]), logits)
    return dict(zip(_labels(folder, len(scores)), scores.tolist(), strict=True))


def _tagged(folder: Path) -> list[tuple[Inputs, Numbers]]:
    _, compute = _network(folder, "AutoModelForTokenClassification")
    references: list[tuple[Inputs, Numbers]] = []
    for text in TEXTS:
        scores = softmax(compute(text)[1].logits[0].numpy())
        labels = _labels(folder, scores.shape[1])
        names = {
            f"{position}:{labels[index]}": float(scores[position, index])
            for position, index in np.ndindex(scores.shape)
        }
        references.append(({"text_input": text}, names))
    return references


def _filled(folder: Path) -> list[tuple[Inputs, Numbers]]:
    tokenizer, compute = _network(folder, "AutoModelForMaskedLM")
    references: list[tuple[Inputs, Numbers]] = []
    for text in TEXTS:
        masked = f"{text} {tokenizer.mask_token}"
        ids, output = compute(masked)
        scores = np.sort(softmax(output.logits[0, ids.index(tokenizer.mask_token_id)].numpy()))[::-1]
        references.append(({"text_input": masked}, {str(rank): float(scores[rank]) for rank in range(5)}))
    return references


def _answered(folder: Path) -> list[tuple[Inputs, Numbers]]:
    """Return the answers; transformers 5 has no pipeline for them, so conch's ``spans.py`` converts the logits."""
    _, compute = _network(folder, "AutoModelForQuestionAnswering")
    encoder = open_encoder(Checkpoint.open(folder))
    references: list[tuple[Inputs, Numbers]] = []
    for text in TEXTS:
        (window,) = windows(encoder.tokenizer.fast.encode(QUESTION, text), encoder.max_length, 0, 0, encoder)
        output = compute(QUESTION, text)[1]
        read = [(window, output.start_logits[0].numpy(), output.end_logits[0].numpy())]
        (best,) = answers(text, read, 1, 15, empty=False)
        references.append(({"question": QUESTION, "context": text}, {"best": best.score}))
    return references


def _seen(folder: Path) -> list[tuple[Inputs, Numbers]]:
    from io import BytesIO

    import torch
    import transformers
    from PIL import Image

    network: Any = transformers.AutoModelForImageClassification.from_pretrained(folder, dtype=torch.float32).eval()
    processor: Any = transformers.AutoImageProcessor.from_pretrained(folder)
    references: list[tuple[Inputs, Numbers]] = []
    for seed, (width, height) in enumerate(SIZES):
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        image, file = Image.fromarray(pixels), BytesIO()
        image.save(file, "PNG")
        with torch.inference_mode():
            logits = network(**processor(images=image, return_tensors="pt")).logits
        references.append(({"image": file.getvalue()}, _by_class(folder, logits)))
    return references


def _heard(folder: Path) -> list[tuple[Inputs, Numbers]]:
    import torch
    import transformers

    make: Any = transformers.pipeline
    pipeline = make("audio-classification", model=str(folder), device="cpu", dtype=torch.float32)
    references: list[tuple[Inputs, Numbers]] = []
    for seed, length in enumerate(LENGTHS):
        samples = np.random.default_rng(seed).uniform(-0.5, 0.5, length).astype(np.float32)
        references.append(
            ({"samples": samples[None]}, {prediction["label"]: prediction["score"] for prediction in pipeline(samples)})
        )
    return references


REFERENCES: Final[Mapping[str, Callable[[Path], list[tuple[Inputs, Numbers]]]]] = {
    "sequence-classification": _classified,
    "token-classification": _tagged,
    "masked": _filled,
    "question-answering": _answered,
    "image-classification": _seen,
    "audio-classification": _heard,
}


# ── the same numbers in the results of conch ──────────────────────────────────────────────────────────────────────────


def _scores(checkpoint: Checkpoint, result: Result) -> Numbers:
    labels, scores = result.outputs["label"], result.outputs["score"]
    assert isinstance(labels, Strings) and not isinstance(scores, Strings)
    names = [element.decode() if isinstance(element, bytes) else element for element in labels.elements]
    return dict(zip(names, scores[0].tolist(), strict=True))


def _ranks(checkpoint: Checkpoint, result: Result) -> Numbers:
    scores = result.outputs["score"]
    assert not isinstance(scores, Strings)
    return {str(rank): score for rank, score in enumerate(scores[0].tolist())}


def _best(checkpoint: Checkpoint, result: Result) -> Numbers:
    return {"best": _ranks(checkpoint, result)["0"]}


def _entities(checkpoint: Checkpoint, result: Result) -> Numbers:
    return {f"{load['index']}:{load['entity']}": load["score"] for load in json.loads(_text(result, "entities"))}


def _sounds(checkpoint: Checkpoint, result: Result) -> Numbers:
    return {load["label"]: load["score"] for load in json.loads(_text(result, "text_output"))}


def _text(result: Result, name: str) -> str:
    value = result.outputs[name]
    assert isinstance(value, Strings)
    (text,) = value.elements
    return text.decode() if isinstance(text, bytes) else text


SCORES: Final[Mapping[str, Callable[[Checkpoint, Result], Numbers]]] = {
    "sequence-classification": _scores,
    "token-classification": _entities,
    "masked": _ranks,
    "question-answering": _best,
    "image-classification": _scores,
    "audio-classification": _sounds,
}
