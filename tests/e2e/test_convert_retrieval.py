"""Retrieval models of every kind, converted for both engines, answer as sentence-transformers does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import requests
import torch
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Normalize, Router
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling, MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Pooling, WeightedLayerPooling
from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder, SparseStaticEmbedding, SpladePooling
from torch import nn
from transformers import AutoTokenizer

from conch.backends.base.arrays import Result
from conch.convert.encoder import variants
from conch.convert.run import convert
from conch.core.errors import ConchError
from tests.causal_rerankers import logit_scorer
from tests.convert_checkpoints import no_progress, quick_plan
from tests.retrieval_models import (
    NEIGHBOURS,
    SIZE,
    backbone,
    close,
    dense,
    embed,
    pooled,
    saved,
    sparse,
    token_vectors,
    vectors,
)
from tests.servers import ConchServer
from tests.task_requests import open_model
from tests.text_checkpoints import TEXTS, answer, request
from tests.unit.convert.conftest import leave_pages_empty

PROMPTS = {"query": "the ", "document": "a "}
MODES = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
VARIANTS = ("onnxruntime-fp32", "openvino-fp32")


def words(folder: Path) -> Any:
    return backbone(folder.with_name(f"{folder.name}-words"), "AutoModelForMaskedLM", "fill-mask")


def tokens(folder: Path, **settings: Any) -> Any:
    return backbone(folder.with_name(f"{folder.name}-tokens"), **settings)


def truncated(folder: Path) -> Path:
    rest = (dense(nn.PReLU(init=0.7), len(MODES) * SIZE, bias=True), Normalize())
    rest[0].linear = nn.Linear(len(MODES) * SIZE, 12)
    rest[0].in_features, rest[0].out_features = len(MODES) * SIZE, 12
    return pooled(folder, *rest, modes=MODES, truncate_dim=7, prompts=PROMPTS, default_prompt_name="document")


def without_prompts(folder: Path) -> Path:
    return saved(folder, tokens(folder), Pooling(SIZE, "mean", include_prompt=False), prompts=PROMPTS)


def weighted_layers(folder: Path) -> Path:
    layers = WeightedLayerPooling(SIZE, num_hidden_layers=2, layer_start=1)
    nn.init.uniform_(layers.layer_weights)
    return saved(folder, tokens(folder, output_hidden_states=True), layers, Pooling(SIZE, "mean"))


def two_networks(folder: Path) -> Path:
    other = backbone(folder.with_name("other"), num_hidden_layers=1)
    routes = [tokens(folder), Pooling(SIZE, "mean")], [other, Pooling(SIZE, "cls"), Normalize()]
    return saved(folder, Router.for_query_document(*routes))


def two_heads(folder: Path) -> Path:
    router = Router.for_query_document([dense(nn.Tanh())], [dense(nn.Identity())])
    return saved(folder, tokens(folder), Pooling(SIZE, "mean"), router)


def splade(folder: Path) -> Path:
    return saved(folder, words(folder), SpladePooling("max"), kind=SparseEncoder, max_active_dims=9)


def splade_sum(folder: Path) -> Path:
    return saved(folder, words(folder), SpladePooling("sum", "log1p_relu"), kind=SparseEncoder)


def inference_free(folder: Path) -> Path:
    documents = [words(folder), SpladePooling("max")]
    tokenizer = AutoTokenizer.from_pretrained(str(folder.with_name(f"{folder.name}-words")))
    queries = [SparseStaticEmbedding(tokenizer, torch.rand(len(tokenizer.get_vocab())))]
    return saved(folder, Router.for_query_document(queries, documents), kind=SparseEncoder)


def csr(folder: Path) -> Path:
    coder = SparseAutoEncoder(SIZE, 4 * SIZE, k=7, normalize=True)
    for parameter in (coder.pre_bias, coder.latent_bias):
        nn.init.normal_(parameter, std=0.1)
    return saved(folder, tokens(folder), Pooling(SIZE, "mean"), coder, kind=SparseEncoder)


def colbert(folder: Path) -> Path:
    first = tokens(folder)
    first.query_expansion, first.query_length, first.document_length = {"strategy": "fixed", "length": 12}, 17, 20
    own = {"module_input_name": "token_embeddings"}
    rest = dense(nn.Identity(), 8, bias=False, **own), MultiVectorMask(skiplist_words=[",", "?"]), Normalize(**own)
    return saved(folder, first, *rest, kind=MultiVectorEncoder, prompts=PROMPTS)


def clustered(folder: Path) -> Path:
    own = {"module_input_name": "token_embeddings"}
    rest = dense(nn.Identity(), 8, bias=False, **own), Normalize(**own), HierarchicalTokenPooling(pool_factor=2.0)
    return saved(folder, tokens(folder), *rest, kind=MultiVectorEncoder)


def three_heads(folder: Path) -> Path:
    pooled(folder, modes="cls")
    torch.save(nn.Linear(SIZE, 1).state_dict(), folder / "sparse_linear.pt")
    torch.save(nn.Linear(SIZE, 6).state_dict(), folder / "colbert_linear.pt")
    return folder


#: The function that saves a model of a kind, the class that reads it, and the vectors of a result (None: sparse ones).
KINDS: dict[str, tuple[Callable[[Path], Path], Any, Callable[[Result], Any] | None]] = {
    "truncated": (truncated, SentenceTransformer, vectors),
    "without_prompts": (without_prompts, SentenceTransformer, vectors),
    "weighted_layers": (weighted_layers, SentenceTransformer, vectors),
    "two_networks": (two_networks, SentenceTransformer, vectors),
    "two_heads": (two_heads, SentenceTransformer, vectors),
    "three_heads": (three_heads, SentenceTransformer, vectors),
    "splade": (splade, SparseEncoder, None),
    "splade_sum": (splade_sum, SparseEncoder, None),
    "inference_free": (inference_free, SparseEncoder, None),
    "csr": (csr, SparseEncoder, None),
    "colbert": (colbert, MultiVectorEncoder, token_vectors),
    "clustered": (clustered, MultiVectorEncoder, token_vectors),
}
CAUSAL = "causal"
#: The kinds whose modules have operations of their own are converted for both engines, the others for ONNX Runtime.
BOTH = ("truncated", "three_heads", "splade", "csr", "colbert", CAUSAL)


def variants_of(name: str) -> tuple[str, ...]:
    return VARIANTS if name in BOTH else VARIANTS[:1]


class Site:
    """The saved models in the folder ``saved``, and the converted ones in ``models``; made when needed."""

    def __init__(self, root: Path) -> None:
        self.saved, self.models = root / "saved", root / "models"
        self.texts, self.pairs = root / "texts.txt", root / "pairs.csv"
        self.texts.write_text("\n".join([*TEXTS, *(text for text in NEIGHBOURS if text.strip())]))
        self.pairs.write_text("query,passage\n" + "".join(f'"{TEXTS[0]}","{text}"\n' for text in TEXTS))

    def converted(self, name: str) -> Path:
        """The folder of a converted model."""
        if not (self.models / name).exists():
            torch.manual_seed(5)
            source = KINDS[name][0](self.saved / name) if name in KINDS else logit_scorer(self.saved / name)
            plan = quick_plan(
                source, self.models, name=name, backends=("onnx", "openvino")[: len(variants_of(name))],
                quantize=("none",), batch_sizes=(1,), sequence_lengths=(8,),
                data=self.texts if name in KINDS else self.pairs,
            )  # fmt: skip
            variants = convert(plan, no_progress).manifest.variants[1:]
            assert [(variant.name, variant.passed) for variant in variants] == [
                (variant, True) for variant in variants_of(name)
            ]
            assert all(variant.agreement["task"]["name"].startswith("nDCG@10") for variant in variants)
        return self.models / name / "1"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        leave_pages_empty(monkeypatch)
        yield Site(tmp_path_factory.mktemp("site"))


def expected(name: str, folder: Path, task: str) -> Any:
    model = KINDS[name][1](str(folder), device="cpu")
    encode = model.encode_query if task == "query" else model.encode_document
    found = [encode(text) for text in NEIGHBOURS]
    return [value.to_dense().numpy() if KINDS[name][2] is None else np.asarray(value) for value in found]


@pytest.mark.parametrize("name", KINDS)
def test_converted_models_answer_as_sentence_transformers(site: Site, name: str) -> None:
    folder = site.converted(name)
    answers = {task: expected(name, site.saved / name, task) for task in ("query", "document")}
    for variant in variants_of(name):
        converted = open_model(folder, variant=variant)
        for task, wanted in answers.items():
            result, convertor = embed(converted, NEIGHBOURS, task=task), KINDS[name][2]
            found = sparse(result, len(wanted[0])) if convertor is None else convertor(result)
            for own, value in zip(found, wanted, strict=True):
                assert own.shape == value.shape
                close(own, value)


@pytest.mark.parametrize("name", ["splade", "truncated", "three_heads"])
def test_int8_covers_the_weights_of_modules(site: Site, tmp_path: Path, name: str) -> None:
    variants.dynamic(site.converted(name) / "onnxruntime-fp32.onnx", tmp_path / "int8.onnx")

    graph = onnx.load(tmp_path / "int8.onnx").graph
    fixed = {tensor.name for tensor in graph.initializer}
    fixed |= {output for node in graph.node if node.op_type == "Constant" for output in node.output}
    products = [node for node in graph.node if node.op_type in ("MatMul", "Gemm")]
    assert products and not [node.name for node in products if node.input[1] in fixed]


def test_heads_in_the_graph_give_what_those_outside_give(site: Site) -> None:
    converted = site.converted("three_heads")
    own = embed(open_model(site.saved / "three_heads"), NEIGHBOURS)
    for variant in VARIANTS:
        found = embed(open_model(converted, variant=variant), NEIGHBOURS)
        close(sparse(found, 99), sparse(own, 99))
        for row, wanted in zip(token_vectors(found), token_vectors(own), strict=True):
            close(row, wanted)


def test_the_output_of_the_network_stays_an_output(site: Site) -> None:
    converted = site.converted("truncated")
    asked = request("last_hidden_state", text_input=list(TEXTS))
    wanted = answer(open_model(site.saved / "truncated"), asked).outputs["last_hidden_state"]
    for variant in VARIANTS:
        close(answer(open_model(converted, variant=variant), asked).outputs["last_hidden_state"], wanted)


def test_a_reranker_over_a_language_model(site: Site) -> None:
    converted = site.converted(CAUSAL)
    model = CrossEncoder(str(site.saved / CAUSAL / "saved"), device="cpu", model_kwargs={"dtype": torch.float32})
    wanted = model.predict([(TEXTS[0], text) for text in TEXTS], batch_size=1)
    asked = request("score", text_input=[TEXTS[0]] * len(TEXTS), text_pair=list(TEXTS))
    for variant in VARIANTS:
        found = answer(open_model(converted, variant=variant), asked)
        close(np.asarray(found.outputs["score"])[:, 0], wanted)


def test_an_option_that_a_graph_cannot_follow_is_refused(site: Site) -> None:
    with pytest.raises(ConchError, match="parameter 'pooling' has no effect on engine 'onnxruntime'"):
        open_model(site.converted("weighted_layers"), variant=VARIANTS[0], pooling="cls")


@pytest.fixture(scope="module")
def server(site: Site) -> Iterator[ConchServer]:
    for name in (*KINDS, CAUSAL):
        site.converted(name)
    # Only the files of a converted model: the checkpoints are gone.
    moved = site.saved.rename(site.saved.with_name("moved"))
    with ConchServer(site.models, log=moved / "log") as server:
        yield server
    moved.rename(site.saved)


def test_converted_models_are_served(site: Site, server: ConchServer) -> None:
    def ask(path: str, **body: Any) -> Any:
        response = requests.post(f"http://{server.http}{path}", json=body, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()

    text = NEIGHBOURS[0]
    for name, (_, kind, _) in KINDS.items():
        wanted = expected(name, site.saved.with_name("moved") / name, "document")[0]
        if kind is SentenceTransformer:
            data = ask("/v1/embeddings", model=name, input=text, input_type="document")["data"]
            close(data[0]["embedding"], wanted)
            continue
        inputs = [
            {"name": key, "datatype": "BYTES", "shape": [1, 1], "data": [value]}
            for key, value in (("text_input", text), ("task", "document"))
        ]
        outputs = {entry["name"]: entry for entry in ask(f"/v2/models/{name}/infer", inputs=inputs)["outputs"]}
        if kind is SparseEncoder:
            found = np.zeros_like(wanted)
            found[outputs["sparse_indices"]["data"]] = outputs["sparse_values"]["data"]
            close(found, wanted)
        else:
            close(np.reshape(outputs["token_embeddings"]["data"], wanted.shape), wanted)
    results = ask("/rerank", model=CAUSAL, query=TEXTS[0], documents=list(TEXTS))["results"]
    assert sorted(entry["index"] for entry in results) == list(range(len(TEXTS)))


def test_models_for_nvidias_server_have_the_default_prompt_and_all_modules(tmp_path: Path) -> None:
    folder, models = truncated(tmp_path / "source"), tmp_path / "models"
    quick = {"backends": ("onnx",), "quantize": ("none",), "batch_sizes": (1,), "sequence_lengths": (8,)}
    convert(quick_plan(folder, models, layout="triton", **quick), no_progress)
    with ConchServer(models, log=tmp_path / "log") as server:
        tensor = {"name": "TEXT", "datatype": "BYTES", "shape": [len(TEXTS)], "data": TEXTS}
        answer = requests.post(
            f"http://{server.http}/v2/models/m_onnx_inference/infer", json={"inputs": [tensor]}, timeout=60
        )
    output = answer.json()["outputs"][0]
    close(
        np.reshape(output["data"], output["shape"]), SentenceTransformer(str(folder), device="cpu").encode(list(TEXTS))
    )
    refused = quick_plan(without_prompts(tmp_path / "other"), tmp_path / "none", layout="triton", **quick)
    with pytest.raises(ConchError, match="this one has modules that stay outside of a graph"):
        convert(refused, no_progress)
