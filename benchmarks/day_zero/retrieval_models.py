"""Tiny models for retrieval, saved by sentence-transformers: every module, every pooling and many backbones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SparseEncoder
from sentence_transformers.base.modules import Normalize, Router, Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling, MultiVectorMask
from sentence_transformers.sentence_transformer.modules import (
    CNN,
    LSTM,
    BoW,
    Dropout,
    LayerNorm,
    Pooling,
    StaticEmbedding,
    WeightedLayerPooling,
    WordEmbeddings,
    WordWeights,
)
from sentence_transformers.sentence_transformer.modules.tokenizer import WhitespaceTokenizer
from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder, SparseStaticEmbedding, SpladePooling
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoTokenizer, CLIPImageProcessor
from transformers.models.auto import modeling_auto

from benchmarks.day_zero.checkpoints import Architecture, write
from tests.retrieval_models import SIZE, backbone, dense, pooled, saved
from tests.text_checkpoints import wordpiece

PROMPTS: Final = {"query": "the station: ", "document": "a bus "}
_POOLINGS: Final = (
    "cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken", ("cls", "max", "weightedmean"),
)  # fmt: skip
_ACTIVATIONS: Final = (
    nn.Tanh(), nn.Identity(), nn.GELU(), nn.ReLU(), nn.SiLU(), nn.Sigmoid(), nn.Softplus(), nn.Mish(),
)  # fmt: skip
#: Values of model_type.
_ENCODERS: Final = (
    "bert", "roberta", "xlm-roberta", "distilbert", "albert", "electra", "mpnet", "deberta-v2",
    "modernbert", "nomic_bert", "gte", "jina_embeddings_v3", "eurobert", "ernie", "convbert", "roformer", "big_bird",
    "longformer", "nystromformer", "mobilebert", "squeezebert", "rembert", "xlnet", "fnet", "t5", "mt5", "umt5",
    "ibert", "megatron-bert", "camembert",
)  # fmt: skip
_DECODERS: Final = (
    "qwen3", "qwen2", "llama", "mistral", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neo", "gpt_neox", "opt",
    "bloom", "phi", "phi3", "stablelm", "falcon", "olmo2", "smollm3", "granite", "starcoder2", "qwen3_moe", "mamba",
    "embedding_gemma2_text",
)  # fmt: skip
_MASKED: Final = ("bert", "roberta", "distilbert", "modernbert", "mpnet", "xlm-roberta", "electra", "albert")
_CLASSIFIERS: Final = ("bert", "roberta", "xlm-roberta", "modernbert", "deberta-v2", "electra", "qwen2", "llama")
_CAUSAL: Final = ("qwen3", "llama", "gemma2", "gpt2", "phi3")
#: The maximum length of a text in tokens, fewer than all networks have positions.
LIMIT: Final = 64
_WORDS: Final = ["station", "bus", "library"]
_CHAT: Final = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}relevant:"


@dataclass(frozen=True, slots=True)
class RetrievalModel:
    """A model of a ``kind`` (``dense``, ``sparse``, ``multi-vector``, ``reranker``, ``pair-classifier``).

    ``save`` writes it below a folder and returns its own folder. ``max_length`` is the parameter of the served model;
    0 leaves it to the folder.
    """

    kind: str
    name: str
    save: Callable[[Path], Path]
    max_length: int = 0


def retrieval_models() -> Iterator[RetrievalModel]:
    """Yield all models."""
    for kind, models in (
        ("dense", _dense_models()),
        ("sparse", _sparse_models()),
        ("multi-vector", _multi_vector_models()),
        ("reranker", _rerankers()),
        ("pair-classifier", _pair_classifiers()),
    ):
        for name, save in models:
            yield RetrievalModel(kind, f"{kind}-{name}", save)
    # Neither the network nor the tokenizer limits the length of a text; conch then refuses long texts by default.
    yield RetrievalModel(
        "dense",
        "dense-without-limit",
        partial(_backbone, "mamba", Pooling(SIZE, "lasttoken"), left=True, limit=10**30),
        max_length=2048,
    )


Models = Iterator[tuple[str, Callable[[Path], Path]]]


def _dense_models() -> Models:
    for mode in _POOLINGS:
        name = mode if isinstance(mode, str) else "-".join(mode)
        for included in (True, False):
            pooling = Pooling(SIZE, mode, include_prompt=included)
            yield f"pooling-{name}{'' if included else '-without-prompt'}", partial(_modules, pooling)
    for activation in _ACTIVATIONS:
        yield f"activation-{type(activation).__name__}", partial(_modules, Pooling(SIZE), dense(activation))
    tokens = dense(nn.ReLU(), SIZE, module_input_name="token_embeddings")
    renamed = dense(nn.Identity(), SIZE, module_output_name="other")
    back = dense(nn.Tanh(), 7, module_input_name="other", module_output_name="sentence_embedding")
    yield "features", partial(_modules, tokens, Pooling(SIZE), renamed, back)
    yield "residual", partial(_modules, Pooling(SIZE), dense(nn.SiLU(), use_residual=True))
    norm = LayerNorm(SIZE)
    nn.init.normal_(norm.norm.weight)
    yield "layer-norm", partial(_modules, Pooling(SIZE), Dropout(0.5), norm)
    yield "weighted-layers", _weighted_layers
    yield "truncated", partial(_modules, Pooling(SIZE), Normalize(), truncate_dim=9)
    yield "default-prompt", partial(_modules, Pooling(SIZE), default_prompt_name="document")
    yield "lower-case", partial(_configured, {"do_lower_case": True, "max_seq_length": 20})
    yield "lengths-by-task", partial(_configured, {"query_length": 5, "document_length": 9})
    yield "static", lambda folder: saved(folder / "model", _table(folder / "table"), Normalize())
    yield "router", _router
    yield "nested-router", _nested_router
    yield "model2vec", _model2vec
    yield "heads", _heads
    yield "learned-activation", partial(_modules, Pooling(SIZE), dense(nn.PReLU()))
    yield "bag-of-words", lambda folder: saved(folder / "model", BoW(_WORDS))
    for name, modules in (
        ("words", (Pooling(SIZE),)),
        ("word-weights", (WordWeights(_WORDS, {"bus": 2.0}), Pooling(SIZE))),
        ("cnn", (CNN(SIZE, 16), Pooling(48))),
        ("lstm", (LSTM(SIZE, 16), Pooling(SIZE))),
    ):
        yield name, partial(_words, *modules)
    yield "clip", _clip
    for kind in _ENCODERS:
        yield f"backbone-{kind}", partial(_backbone, kind, Pooling(SIZE))
    for kind in _DECODERS:
        yield f"backbone-{kind}", partial(_backbone, kind, Pooling(SIZE, "lasttoken"), left=True)
    for kind in ("qwen3", "gpt2", "gemma3_text"):
        yield f"backbone-{kind}-mean", partial(_backbone, kind, Pooling(SIZE, "mean"), left=True)


def _modules(*modules: Any, **settings: Any) -> Path:
    *rest, folder = modules
    return saved(folder / "model", backbone(folder / "backbone"), *rest, prompts=PROMPTS, **settings)


def _configured(settings: dict[str, Any], folder: Path) -> Path:
    model = pooled(folder / "model", prompts=PROMPTS)
    path = model / "sentence_bert_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return model


def _weighted_layers(folder: Path) -> Path:
    first = backbone(folder / "backbone", num_hidden_layers=4, output_hidden_states=True)
    weighted = WeightedLayerPooling(SIZE, num_hidden_layers=4, layer_start=2)
    nn.init.uniform_(weighted.layer_weights, 0.5, 1.5)
    return saved(folder / "model", first, weighted, Pooling(SIZE))


def _table(folder: Path) -> StaticEmbedding:
    folder.mkdir(parents=True)
    wordpiece(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return StaticEmbedding(tokenizer, embedding_weights=torch.randn(tokenizer.get_vocab_size(), SIZE))


def _router(folder: Path) -> Path:
    documents = [backbone(folder / "backbone"), Pooling(SIZE)]
    return saved(folder / "model", Router.for_query_document([_table(folder / "table")], documents), Normalize())


def _nested_router(folder: Path) -> Path:
    inner = Router({"one": [dense(nn.Tanh(), 7)], "two": [dense(nn.ReLU(), 7)]}, default_route="two")
    mappings = {("query", None): "asked", (None, "text"): "said"}
    outer = Router({"asked": [dense(nn.Sigmoid(), 7)], "said": [inner]}, route_mappings=mappings)
    return saved(folder / "model", backbone(folder / "backbone"), Pooling(SIZE), outer)


def _model2vec(folder: Path) -> Path:
    model = saved(folder / "model", _table(folder / "table"), Normalize())
    count = len(AutoTokenizer.from_pretrained(str(folder / "table")))
    (model / "model.safetensors").unlink()
    weights = {"embeddings": torch.randn(40, 16), "mapping": torch.arange(count) % 40, "weights": torch.rand(count)}
    save_file(weights, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps({"model_type": "model2vec", "architectures": ["StaticModel"]}))
    return model


def _heads(folder: Path) -> Path:
    """Write a model with the heads of BGE-M3, whose dense vectors are compared."""
    model = _modules(Pooling(SIZE, "cls"), Normalize(), folder)
    for name, size in (("sparse", 1), ("colbert", 6)):
        torch.save(nn.Linear(SIZE, size).state_dict(), model / f"{name}_linear.pt")
    return model


def _words(*modules: Any) -> Path:
    *rest, folder = modules
    embeddings = torch.randn(len(_WORDS), SIZE).numpy()
    return saved(folder / "model", WordEmbeddings(WhitespaceTokenizer(_WORDS), embeddings), *rest)


def _clip(folder: Path) -> Path:
    network = _network(folder / "backbone", "clip", "MODEL_MAPPING_NAMES")
    side = json.loads((Path(network) / "config.json").read_text())["vision_config"]["image_size"]
    processor = CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    processor.save_pretrained(network)
    return saved(folder / "model", Transformer(network))


def _network(
    folder: Path, kind: str, mapping: str, *, left: bool = False, template: str | None = None, limit: int = LIMIT
) -> str:
    """Write the tiny network of a ``model_type``; ``left`` is the side on which its texts are padded."""
    listed = getattr(modeling_auto, mapping)
    names = modeling_auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES if kind.endswith("t5") else listed
    write(folder, Architecture("causal" if "CAUSAL" in mapping else "retrieval", kind, names[kind]))
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    if left:
        tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = template
    tokenizer.model_max_length = limit
    tokenizer.save_pretrained(str(folder))
    return str(folder)


def _backbone(kind: str, pooling: Pooling, folder: Path, *, left: bool = False, limit: int = LIMIT) -> Path:
    first = Transformer(_network(folder / "backbone", kind, "MODEL_MAPPING_NAMES", left=left, limit=limit))
    pooling = Pooling(first.get_embedding_dimension(), pooling.pooling_mode)
    return saved(folder / "model", first, pooling, Normalize(), prompts=PROMPTS)


def _sparse_models() -> Models:
    for strategy in ("max", "sum"):
        for activation in ("relu", "log1p_relu"):
            yield f"splade-{strategy}-{activation}", partial(_splade, "bert", SpladePooling(strategy, activation))
    for kind in _MASKED:
        yield f"splade-{kind}", partial(_splade, kind, SpladePooling("max"))
    yield "splade-active", partial(_splade, "bert", SpladePooling("max"), max_active_dims=9)
    yield "without-inference", _without_inference
    yield "auto-encoder", _auto_encoder


def _splade(kind: str, pooling: SpladePooling, folder: Path, **settings: Any) -> Path:
    network = _network(folder / "backbone", kind, "MODEL_FOR_MASKED_LM_MAPPING_NAMES")
    first = Transformer(network, transformer_task="fill-mask")
    return saved(folder / "model", first, pooling, kind=SparseEncoder, **settings)


def _without_inference(folder: Path) -> Path:
    documents = backbone(folder / "backbone", "AutoModelForMaskedLM", "fill-mask")
    tokenizer = AutoTokenizer.from_pretrained(str(folder / "backbone"))
    queries = SparseStaticEmbedding(tokenizer, torch.rand(len(tokenizer.get_vocab())))
    router = Router.for_query_document([queries], [documents, SpladePooling("max")])
    return saved(folder / "model", router, kind=SparseEncoder)


def _auto_encoder(folder: Path) -> Path:
    coder = SparseAutoEncoder(SIZE, 4 * SIZE, k=7, normalize=True)
    for parameter in (coder.pre_bias, coder.latent_bias):
        nn.init.normal_(parameter, std=0.1)
    return saved(folder / "model", backbone(folder / "backbone"), Pooling(SIZE, "mean"), coder, kind=SparseEncoder)


def _multi_vector_models() -> Models:
    for name, expansion in (
        ("no-expansion", None),
        ("fixed", {"strategy": "fixed", "length": 12}),
        ("attended", {"strategy": "fixed", "length": 16, "attend": True}),
        ("minimum", {"strategy": "min", "length": 9, "token": "[SEP]"}),
    ):
        yield name, partial(_colbert, expansion, "bert")
    yield "token-pooling", partial(_colbert, None, "bert", HierarchicalTokenPooling(2))
    for kind in ("roberta", "modernbert", "distilbert", "qwen3"):
        yield f"backbone-{kind}", partial(_colbert, None, kind)


def _colbert(expansion: dict[str, Any] | None, kind: str, *rest: Any) -> Path:
    *modules, folder = rest
    own = backbone(folder / "own") if kind == "bert" else None
    first = own or Transformer(_network(folder / "backbone", kind, "MODEL_MAPPING_NAMES"))
    first.query_expansion, first.query_length, first.document_length = expansion, 17, 40
    project = dense(nn.Identity(), 8, bias=False, module_input_name="token_embeddings")
    mask = MultiVectorMask(skiplist_words=[",", "?"])
    tokens = Normalize(module_input_name="token_embeddings")
    return saved(folder / "model", first, project, mask, tokens, *modules, kind=MultiVectorEncoder, prompts=PROMPTS)


def _rerankers() -> Models:
    for kind in _CLASSIFIERS:
        yield f"backbone-{kind}", partial(_cross_encoder, kind)
    for activation in (nn.Identity(), nn.Tanh(), nn.GELU()):
        name = type(activation).__name__
        yield f"activation-{name}", partial(_cross_encoder, "bert", activation_fn=activation)
    yield "prompt", partial(_cross_encoder, "bert", prompts={"web": "a search: "}, default_prompt_name="web")
    for kind in _CAUSAL:
        yield f"logits-{kind}", partial(_logit_score, kind, _CHAT)
        yield f"logits-{kind}-without-template", partial(_logit_score, kind, None)


def _pair_classifiers() -> Models:
    yield "bert", partial(_cross_encoder, "bert", labels=3)
    yield "roberta-softmax", partial(_cross_encoder, "roberta", labels=3, activation_fn=nn.Softmax(-1))


def _cross_encoder(kind: str, folder: Path, *, labels: int = 1, **settings: Any) -> Path:
    network = _network(folder / "backbone", kind, "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES")
    options = {"ignore_mismatched_sizes": True}  # the network was written with two labels
    CrossEncoder(network, num_labels=labels, device="cpu", model_kwargs=options, **settings).save(str(folder / "model"))
    return folder / "model"


def _logit_score(kind: str, template: str | None, folder: Path) -> Path:
    network = _network(folder / "backbone", kind, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", left=True, template=template)
    modules = [Transformer(network, transformer_task="text-generation"), LogitScore(20, 21)]
    CrossEncoder(modules=modules, device="cpu").save(str(folder / "model"))
    return folder / "model"
