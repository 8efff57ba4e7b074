"""Compares the vectors and scores that a server gives with those of sentence-transformers over the same folders.

Models are served in groups by one server, each from its bare folder. Each of 16 texts of different lengths is sent
alone, all in one request, and all in concurrent requests, over three routes, as a text, a query and a document.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import torch
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder

from benchmarks.day_zero.checkpoints import CannotMake
from benchmarks.day_zero.outcome import Outcome
from benchmarks.day_zero.retrieval_models import RetrievalModel
from benchmarks.day_zero.tokenizer import TEXTS as SENTENCES
from benchmarks.tables import markdown
from conch.convert.libraries import silence_libraries
from conch.core.errors import one_line
from tests.servers import ConchServer

#: The numbers of words of the texts; the longest texts are truncated.
LENGTHS: Final = (1, 2, 3, 4, 5, 6, 8, 9, 11, 13, 16, 20, 25, 33, 60, 150)
_WORDS: Final = " ".join(SENTENCES * 4).split()
TEXTS: Final = tuple(" ".join(_WORDS[index : index + count]) for index, count in enumerate(LENGTHS))
QUERY: Final = "Where is the nearest library?"
#: The largest difference from the reference, as a share of the largest number of a result.
BOUND: Final = 1e-5
#: Models in one server.
GROUP: Final = 8
#: Kinds whose results are one array for all texts.
RANKED: Final = ("reranker", "pair-classifier")
_TIMEOUT_S: Final = 300
_TASKS: Final = (None, "query", "document")

Array = np.ndarray[Any, Any]
Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Route:
    """A path with the model's name in place of NAME, the body of a request, and the results in a response.

    ``body`` returns None if the route cannot express the task.
    """

    path: str
    body: Callable[[str, Sequence[str], str | None], Body | None]
    results: Callable[[Any], list[Any]]
    raw: bool = False


def compare_models(models: Sequence[RetrievalModel]) -> str:
    """Compare all ``models``; returns a table of the verdicts, and one of the models that are not exact."""
    rows: list[tuple[RetrievalModel, Outcome]] = []
    for start in range(0, len(models), GROUP):
        group = models[start : start + GROUP]
        with tempfile.TemporaryDirectory(prefix="day-zero-") as folder, silence_libraries():
            for model, outcome in _compare_group(Path(folder), group):
                print(f"{model.name}: {outcome.verdict} {outcome.reason}", file=sys.__stderr__, flush=True)
                rows.append((model, outcome))
    return _tables(rows)


def _tables(rows: Sequence[tuple[RetrievalModel, Outcome]]) -> str:
    verdicts = ("exact", "refused", "differs", "fails")
    compared = [(model.kind, outcome.verdict) for model, outcome in rows if outcome.verdict != "none"]
    kinds = [*dict.fromkeys(kind for kind, _ in compared), "all"]
    summary = [["kind", "models", *verdicts]]
    for kind in kinds:
        found: list[str] = [verdict for own, verdict in compared if kind in (own, "all")]
        summary.append([kind, str(len(found)), *(str(found.count(verdict)) for verdict in verdicts)])
    others = [["model", "", "reason"]] + [
        [model.name, outcome.verdict, outcome.reason.replace("|", "\\|")]
        for model, outcome in rows
        if outcome.verdict != "exact"
    ]
    return markdown(summary) + ("\n" + markdown(others) if len(others) > 1 else "")


def _compare_group(folder: Path, group: Sequence[RetrievalModel]) -> Iterable[tuple[RetrievalModel, Outcome]]:
    repository = folder / "repository"
    saved = []
    for model in group:
        version = repository / model.name / "1"
        try:
            torch.manual_seed(0)
            version.parent.mkdir(parents=True)
            model.save(folder / model.name).rename(version)
            if model.max_length:
                parameter = f'parameters {{ key: "max_length" value {{ string_value: "{model.max_length}" }} }}'
                (version.parent / "config.pbtxt").write_text(f'backend: "huggingface"\n{parameter}\n')
            saved.append((model, reference(model.kind, version)))
        except Exception as error:
            if not isinstance(error, CannotMake):
                traceback.print_exc(file=sys.__stderr__)
            yield model, Outcome("none", f"{type(error).__name__}: {one_line(error)[:200]}")
    flags = ("--exit-on-error=false", "--model-control-mode=explicit", "--log-verbose=0")
    with ConchServer(repository, *flags, log=folder / "log") as server:
        address = f"http://{server.http}"
        for model, expected in saved:
            try:
                post(f"{address}/v2/repository/models/{model.name}/load", {})
            except HTTPError as error:
                yield model, Outcome("refused", _reason(error).replace(str(repository), "FOLDER"))
                continue
            yield model, _compare(address, model, expected)
            post(f"{address}/v2/repository/models/{model.name}/unload", {})


def reference(kind: str, folder: Path) -> dict[tuple[str | None, bool], list[Any]]:
    """Return the results of sentence-transformers by task, and whether scores are raw; each text runs alone."""
    if kind in RANKED:
        ranker = CrossEncoder(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
        pairs = [(QUERY, text) for text in TEXTS]
        raw = ranker.predict(pairs, batch_size=1, activation_fn=torch.nn.Identity())
        return {(None, False): [ranker.predict(pairs, batch_size=1)], (None, True): [raw]}
    classes = {"dense": SentenceTransformer, "sparse": SparseEncoder, "multi-vector": MultiVectorEncoder}
    model = classes[kind](str(folder), device="cpu")
    encoders = {None: model.encode, "query": model.encode_query, "document": model.encode_document}
    results: dict[tuple[str | None, bool], list[Any]] = {}
    for task, encode in encoders.items():
        try:
            results[task, False] = [_numbers(encode(text)) for text in TEXTS]
        except ValueError:  # a Router may have no route for a task
            if task is None:
                raise
    return results


def _numbers(value: Any) -> Array:
    if isinstance(value, torch.Tensor):
        value = (value.to_dense() if value.is_sparse else value).numpy()
    return np.asarray(value)


def _compare(address: str, model: RetrievalModel, expected: Mapping[tuple[str | None, bool], list[Any]]) -> Outcome:
    for route in ROUTES[model.kind]:
        for task in _TASKS:
            if (task, route.raw) not in expected or route.body(model.name, TEXTS, task) is None:
                continue
            place = f"{route.path}, {task or 'no task'}"
            try:
                if problem := _compare_route(address, model, route, task, expected[task, route.raw]):
                    return Outcome("differs", f"{place}, {problem}")
            except HTTPError as error:
                return Outcome("fails", f"{place}: {_reason(error)}")
    return Outcome("exact")


def _compare_route(
    address: str, model: RetrievalModel, route: Route, task: str | None, expected: Sequence[Array]
) -> str:
    """Send the texts in three ways; returns the first difference. Raises HTTPError."""
    url = f"{address}{route.path.replace('NAME', model.name)}"

    def ask(*texts: str) -> list[Any]:
        return route.results(post(url, route.body(model.name, texts, task)))

    with ThreadPoolExecutor(len(TEXTS)) as threads:
        ways: dict[str, Iterable[list[Any]]] = {
            "alone": map(ask, TEXTS),
            "in one request": (ask(*texts) for texts in [TEXTS]),
            "concurrently": chain.from_iterable(threads.map(ask, texts) for texts in [TEXTS]),
        }
        for way, responses in ways.items():
            found = [result for results in responses for result in results]
            if model.kind in RANKED:
                found = [np.concatenate(found)]
            if problem := difference(found, expected):
                return f"{way}: {problem}"
    return ""


def difference(found: Sequence[Any], expected: Sequence[Array]) -> str:
    """Return how results differ by more than ``BOUND``, or an empty text."""
    if len(found) != len(expected):
        return f"{len(found)} results, not {len(expected)}"
    for index, wanted in enumerate(expected):
        own: Any = found[index]
        if isinstance(own, dict):  # the elements of a sparse vector
            elements, own = own, np.zeros_like(wanted)
            own[list(elements)] = list(elements.values())
        if own.shape != wanted.shape:
            return f"text {index} has the shape {own.shape}, not {wanted.shape}"
        largest = float(np.abs(wanted).max(initial=0))
        error = float(np.abs(own - wanted).max(initial=0))
        if not error <= BOUND * largest:
            return f"text {index} differs by {error:.1e} of {largest:.1e}"
    return ""


def post(url: str, body: Body | None) -> Any:
    """Return the JSON response of a request. Raises HTTPError."""
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=_TIMEOUT_S) as response:
        content = response.read()
    return json.loads(content) if content else None


def _reason(error: HTTPError) -> str:
    """Return the message of an error response, in one line."""
    message = json.loads(error.read())["error"]
    return " ".join(str(message["message"] if isinstance(message, dict) else message).split())


def _infer(name: str, texts: Sequence[str], task: str | None) -> Body:
    return {"inputs": [_tensor("text_input", texts), *([_tensor("task", [task] * len(texts))] if task else [])]}


def _infer_pairs(name: str, texts: Sequence[str], task: str | None) -> Body:
    return {"inputs": [_tensor("text_input", [QUERY] * len(texts)), _tensor("text_pair", texts)]}


def _tensor(name: str, texts: Sequence[str | None]) -> Body:
    return {"name": name, "datatype": "BYTES", "shape": [len(texts), 1], "data": list(texts)}


def _outputs(response: Any) -> dict[str, Array]:
    types = {"FP32": np.float32, "INT64": np.int64, "UINT32": np.uint32}
    return {
        output["name"]: np.array(output["data"], types[output["datatype"]]).reshape(output["shape"])
        for output in response["outputs"]
        if output["datatype"] in types
    }


def _sparse_elements(response: Any) -> list[Any]:
    outputs = _outputs(response)
    rows = zip(outputs["sparse_indices"], outputs["sparse_values"], strict=True)
    return [{int(index): value for index, value in zip(*row, strict=True) if index >= 0} for row in rows]


def _elements(rows: Sequence[Sequence[Body]]) -> list[Any]:
    return [{item["index"]: np.float32(item["value"]) for item in row} for row in rows]


def _token_vectors(response: Any) -> list[Array]:
    outputs = _outputs(response)
    rows = zip(outputs["token_embeddings"], outputs["num_vectors"], strict=True)
    return [vectors[: count[0]] for vectors, count in rows]


def _floats(rows: Iterable[Any]) -> list[Array]:
    return [np.array(row, np.float32) for row in rows]


def _ranked(results: Sequence[Body], member: str) -> list[Array]:
    return [np.array([result[member] for result in sorted(results, key=lambda result: result["index"])], np.float32)]


def _tei(name: str, texts: Sequence[str], task: str | None) -> Body | None:
    """Return a body of TEI's API, which knows prompts instead of tasks."""
    return None if task else {"inputs": list(texts)}


ROUTES: Final[Mapping[str, Sequence[Route]]] = {
    "dense": (
        Route("/v2/models/NAME/infer", _infer, lambda response: list(_outputs(response)["embedding"])),
        Route(
            "/v1/embeddings",
            lambda name, texts, task: {
                "model": name, "input": list(texts), **({"input_type": task} if task else {}),
            },
            lambda response: _floats(item["embedding"] for item in response["data"]),
        ),
        Route(
            "/v2/models/NAME/embed",
            lambda name, texts, task: None if task else {"inputs": list(texts), "normalize": False},
            _floats,
        ),
    ),
    "sparse": (
        Route("/v2/models/NAME/infer", _infer, _sparse_elements),
        Route("/v2/models/NAME/embed_sparse", _tei, _elements),
        Route("/", _tei, _elements),  # only one model is loaded
    ),
    "multi-vector": (
        Route("/v2/models/NAME/infer", _infer, _token_vectors),
        Route("/v2/models/NAME/embed_all", _tei, _floats),
        Route(
            "/pooling",
            lambda name, texts, task: None if task else {"model": name, "input": list(texts)},
            lambda response: _floats(item["data"] for item in response["data"]),
        ),
    ),
    "pair-classifier": (Route("/v2/models/NAME/infer", _infer_pairs, lambda response: [_outputs(response)["score"]]),),
    "reranker": (
        Route("/v2/models/NAME/infer", _infer_pairs, lambda response: [_outputs(response)["score"][:, 0]]),
        Route(
            "/rerank",
            lambda name, texts, task: {"model": name, "query": QUERY, "documents": list(texts)},
            lambda response: _ranked(response["results"], "relevance_score"),
        ),
        Route(
            "/v2/models/NAME/rerank",
            lambda name, texts, task: {"query": QUERY, "texts": list(texts), "raw_scores": True},
            lambda response: _ranked(response, "score"),
            raw=True,
        ),
    ),
}  # fmt: skip
