"""The modules of a sentence-transformers folder: ``modules.json`` and the configuration of each module, as a tree.

Class paths of all versions are accepted (``sentence_transformers.models.Pooling`` as well as
``sentence_transformers.sentence_transformer.modules.pooling.Pooling``), and that of PyLate's Dense. Reads no weights.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PureWindowsPath
from string import punctuation
from typing import Any, Final

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.gguf_retrieval import gguf_pooling
from conch.checkpoints.task import COLBERT, CONTRASTIVE
from conch.core.errors import invalid, unsupported

SETTINGS: Final = "config_sentence_transformers.json"
#: Kinds of models (``model_type`` in ``SETTINGS``) by their results: one vector, one sparse vector, a vector per token.
DENSE, SPARSE, MULTI_VECTOR = "SentenceTransformer", "SparseEncoder", "MultiVectorEncoder"
#: PyLate's name of ``MULTI_VECTOR``.
_PYLATE: Final = "ColBERT"

#: The weights of the heads of BGE-M3.
HEADS: Final = ("sparse_linear.pt", "colbert_linear.pt")
#: Modules with a network that transformers loads.
NETWORKS: Final = frozenset({"Transformer", "MLMTransformer", "CLIPModel"})
#: Modules that read texts: those, and tables with a row for each token.
READERS: Final = NETWORKS | {"StaticEmbedding", "SparseStaticEmbedding"}
#: Modules that compute features from features.
STEPS: Final = frozenset({
    "Pooling", "Dense", "Normalize", "LayerNorm", "Dropout", "WeightedLayerPooling", "SpladePooling",
    "SparseAutoEncoder", "MultiVectorMask", "HierarchicalTokenPooling",
})  # fmt: skip
_SERVED: Final = READERS | STEPS | {"Router"}
_ALIASES: Final[Mapping[str, str]] = {"Asym": "Router"}
_NAMESPACE: Final = "sentence_transformers."
_FOREIGN: Final = frozenset({"pylate.models.Dense.Dense", "pylate.models.Dense"})

#: Pooling modes by their key in the config.json of older Pooling modules; several modes are concatenated in this order.
KEYS: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
MODES: Final = frozenset(KEYS.values())
#: The output of methods that embed texts or images.
FEATURES: Final = "pooler_output"
#: The methods of CLIP's and similar networks, which are also those of a CLIPModel module.
_CONTRASTIVE_CONFIG: Final[Mapping[str, Any]] = {
    "modality_config": {
        kind: {"method": f"get_{kind}_features", "method_output_name": FEATURES} for kind in ("text", "image")
    },
    "module_output_name": "sentence_embedding",
}
#: The configuration of networks that embed pages of documents, such as ColPali.
_RETRIEVAL_CONFIG: Final[Mapping[str, Any]] = {
    "transformer_task": "retrieval",
    "modality_config": {kind: {"method": "forward", "method_output_name": "embeddings"} for kind in ("text", "image")},
    "module_output_name": "token_embeddings",
}
#: Model types whose networks were trained with texts of the maximum length, because they take no attention mask.
_FILLED: Final = ("siglip", "siglip2")
#: Names of the hidden size in config.json.
_SIZES: Final = ("hidden_size", "d_model", "dim", "n_embd")
#: The features that modules read and write.
TOKENS, SENTENCE = "token_embeddings", "sentence_embedding"


@dataclass(frozen=True, slots=True)
class Module:
    """A module: its class name ``kind``, its folder ``path`` in the checkpoint (empty for the checkpoint's own folder).

    ``config`` is its configuration; ``routes`` are the module lists of a Router by name.
    """

    kind: str
    path: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    routes: Mapping[str, tuple[Module, ...]] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """The feature that a step reads."""
        if self.kind in ("Pooling", "SpladePooling"):
            return TOKENS
        return str(self.config.get("module_input_name") or SENTENCE)

    @property
    def target(self) -> str:
        """The feature that a step or network writes."""
        if self.kind in NETWORKS:
            return str(self.config.get("module_output_name") or TOKENS)
        if self.kind == "WeightedLayerPooling":
            return TOKENS
        return str(self.config.get("module_output_name") or (SENTENCE if "Pooling" in self.kind else self.source))

    @property
    def methods(self) -> tuple[str, str] | None:
        """The methods of the network that read texts and images; None if it reads only texts."""
        if self.config.get("transformer_task") == "retrieval":
            return "forward", "forward"
        inputs = self.config.get("modality_config") or {}
        text, image = (inputs.get(kind) or {} for kind in ("text", "image"))
        methods = str(text.get("method")), str(image.get("method"))
        return methods if methods == ("get_text_features", "get_image_features") else None

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes of a Pooling module."""
        named = self.config.get("pooling_mode")
        if named is not None:
            return tuple(pooling_mode(name) for name in ([named] if isinstance(named, str) else named))
        return tuple(mode for key, mode in KEYS.items() if self.config.get(key)) or ("mean",)


def pooling_mode(name: str) -> str:
    """Return the canonical name of a pooling mode. Raises INVALID_ARG for an unknown one."""
    mode = "lasttoken" if name == "last" else name
    if mode not in MODES:
        raise invalid(f"pooling is '{name}'; it must be one of {', '.join(sorted(MODES | {'last'}))}")
    return mode


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a model by name, and the name of its default prompt (empty: none)."""

    by_name: Mapping[str, str] = field(default_factory=dict)
    default: str = ""

    def text(self, name: str | None, task: str | None) -> str:
        """Return the prompt ``name``, or without a name that of ``task`` (``query``, ``document``), or the default one.

        Raises INVALID_ARG for a name that does not exist, listing those that do.
        """
        if name is None:
            if task == "query" and "query" in self.by_name:
                name = "query"
            elif task == "document":
                name = next((name for name in ("document", "passage", "corpus") if name in self.by_name), None)
            name = self.default if name is None else name
            return self.by_name.get(name, "")
        try:
            return self.by_name[name]
        except KeyError:
            raise invalid(f"prompt_name is '{name}'; the checkpoint has {', '.join(self.by_name) or 'none'}") from None


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    """A model that embeds texts: its ``family`` (``DENSE``, ``SPARSE`` or ``MULTI_VECTOR``), modules and settings.

    ``saved`` is false for a checkpoint without modules, which gets a Pooling module. ``similarity`` is the name of the
    function that compares its vectors, ``truncate_dim`` the number of elements that are kept (0: all), ``active_dims``
    the number of non-zero elements of a sparse vector (0: all), and ``normalize`` adds a normalization at the end.
    ``prefixes`` are prompts that begin with a token of the vocabulary, which the tokenizer must not divide.
    ``dimension`` is the size of a vector, -1 if it is unknown or differs between tasks. ``heads`` is true for a dense
    model with the heads of BGE-M3, which also return sparse vectors and a vector per token.
    """

    family: str
    modules: tuple[Module, ...]
    saved: bool
    prompts: Prompts = Prompts()
    similarity: str = "cosine"
    truncate_dim: int = 0
    active_dims: int = 0
    normalize: bool = False
    prefixes: tuple[str, ...] = ()
    dimension: int = -1
    heads: bool = False

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> EmbeddingModel:
        """Read the modules and settings of a checkpoint; the options ``pooling`` and ``normalize`` override them.

        Raises INVALID_ARG for files that are missing or wrong, UNSUPPORTED for a module that is not served, by name.
        """
        settings = checkpoint.json(SETTINGS) or {}
        if not checkpoint.modules() and checkpoint.config.get("model_type") == "model2vec":
            raise unsupported(
                f"'{checkpoint.source}' is a Model2Vec folder without modules.json: save it with a newer model2vec, or "
                "with StaticEmbedding.from_model2vec of sentence-transformers"
            )
        family = family_of(checkpoint)
        if family not in (DENSE, SPARSE, MULTI_VECTOR):
            raise unsupported(f"'{checkpoint.source}' is a {family} of sentence-transformers, which embeds no text")
        legacy = _Legacy.read(checkpoint, settings) if family == MULTI_VECTOR else _Legacy()
        reader = _ModuleReader(checkpoint, legacy)
        listed: Sequence[Mapping[str, Any]] = ()
        modules: tuple[Module, ...]
        if checkpoint.gguf is not None:
            # As in llama-server; GGUF files do not record whether vectors are normalized.
            pooling = Module("Pooling", config={"pooling_mode": gguf_pooling(checkpoint.gguf)})
            modules = Module("Transformer"), pooling, Module("Normalize")
        elif listed := checkpoint.modules():
            modules = tuple(reader.module(entry.get("type"), entry.get("path")) for entry in listed)
        else:
            contrastive = checkpoint.config.get("model_type") in CONTRASTIVE
            modules = (reader.module(_NAMESPACE + ("CLIPModel" if contrastive else "Transformer"), ""),)
            if family == DENSE:
                modules += () if contrastive else (Module("Pooling"),)
            elif not retrieval_head(checkpoint):
                modules += (legacy.projection(checkpoint),)
        modules += legacy.appended()
        saved = bool(listed) or family != DENSE
        prompts = dict.fromkeys(("query", "document"), "") if saved else {}
        prompts |= {str(name): str(text or "") for name, text in (settings.get("prompts") or {}).items()}
        prompts |= legacy.prompts(prompts)
        default = str(settings.get("default_prompt_name") or "")
        if default and default not in prompts:
            raise invalid(
                f"'{checkpoint.source}' has the default_prompt_name '{default}' in {SETTINGS}; its prompts are "
                f"{', '.join(prompts)}"
            )
        options = checkpoint.options
        if options.pooling:
            config = {"pooling_mode": pooling_mode(options.pooling)}
            modules = tuple(
                replace(module, config={**module.config, **config}) if module.kind == "Pooling" else module
                for module in modules
            )
        if options.normalize is not None:
            modules = tuple(module for module in modules if module.kind != "Normalize" or module.source != SENTENCE)
        fallback = {DENSE: "cosine", SPARSE: "dot", MULTI_VECTOR: "maxsim"}[family]
        model = cls(
            family,
            modules,
            saved,
            Prompts(prompts, default),
            str(settings.get("similarity_fn_name") or fallback),
            truncate_dim=_count(checkpoint, settings, "truncate_dim") if saved and family == DENSE else 0,
            active_dims=_count(checkpoint, settings, "max_active_dims") if family == SPARSE else 0,
            normalize=bool(options.normalize),
            prefixes=tuple(legacy.prefixes.values()),
            heads=family == DENSE and modules[0].kind in NETWORKS and checkpoint.has(*HEADS),
        )
        for task in model.tasks:
            _check(checkpoint, model.path_of(task), family)
        sizes = {_size(checkpoint, model.path_of(task)) for task in model.tasks}
        size = sizes.pop() if len(sizes) == 1 else -1
        if model.truncate_dim:
            size = min(size, model.truncate_dim) if size > 0 else model.truncate_dim
        return replace(model, dimension=size)

    @property
    def tasks(self) -> tuple[str | None, ...]:
        """The tasks that a request may choose; None stands for no task, which a Router without a default route "
        "refuses."""
        routers = [*_routers(self.modules)]
        names: dict[str | None, None] = dict.fromkeys((None, "query", "document"))
        for router in routers:
            names |= dict.fromkeys(router.routes)
            names |= dict.fromkeys(task for task, _ in _mappings(router) if task)
        return tuple(task for task in names if _flat(self.modules, task) is not None)

    def path_of(self, task: str | None) -> tuple[Module, ...]:
        """Return the modules without Routers that a request with ``task`` goes through. Raises INVALID_ARG for none."""
        if task not in self.tasks:
            known = ", ".join(sorted(name for name in self.tasks if name))
            raise invalid(f"task is '{task}'; the model has {known}" if task else f"the model needs a task: {known}")
        return _flat(self.modules, task) or ()

    @property
    def networks(self) -> bool:
        """Whether any module has a network."""
        return any(module.kind in NETWORKS for task in self.tasks for module in self.path_of(task))

    @property
    def reads_images(self) -> bool:
        """Whether the model embeds images as well as texts."""
        return any(self.path_of(task)[0].methods is not None for task in self.tasks)


def family_of(checkpoint: Checkpoint) -> str:
    """Return ``model_type`` of a sentence-transformers folder, ``DENSE`` without one."""
    kind = str((checkpoint.json(SETTINGS) or {}).get("model_type") or "")
    colbert = COLBERT in (checkpoint.config.get("architectures") or ())
    if kind == _PYLATE or (not kind and (colbert or (retrieval_head(checkpoint) and not checkpoint.modules()))):
        return MULTI_VECTOR
    return kind or DENSE


def retrieval_head(checkpoint: Checkpoint) -> str:
    """Return the class of transformers for pages of documents (ColPali …) in config.json; empty if none."""
    names = checkpoint.config.get("architectures") or ()
    return next((name for name in names if name.endswith("ForRetrieval")), "")


def joined(path: str, name: str) -> str:
    """Return the name of a file in the folder of a module."""
    return f"{path}/{name}" if path else name


def _count(checkpoint: Checkpoint, settings: Mapping[str, Any], name: str) -> int:
    """Return a number in ``SETTINGS``, 0 if none. Raises INVALID_ARG unless it is a positive integer."""
    size = settings.get(name)
    if size is None:
        return 0
    if type(size) is not int or size < 1:
        raise invalid(
            f"'{checkpoint.source}' has the {name} {size!r} in {SETTINGS}; it must be a whole number of at least 1"
        )
    return size


@dataclass(frozen=True, slots=True)
class _Legacy:
    """Settings of multi-vector folders that PyLate or Stanford's ColBERT wrote; empty for all others.

    ``transformer`` are defaults of the Transformer's configuration, ``prefixes`` the tokens before a text by task, and
    ``skiplist`` the words whose vectors documents lack; None if no mask is to be appended.
    """

    transformer: Mapping[str, Any] = field(default_factory=dict)
    prefixes: Mapping[str, str] = field(default_factory=dict)
    skiplist: Sequence[str] | None = None

    @classmethod
    def read(cls, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> _Legacy:
        if not checkpoint.modules() and retrieval_head(checkpoint):
            return cls()
        if not checkpoint.modules():
            return cls._stanford(checkpoint.json("artifact.metadata") or {})
        keys = ("query_length", "document_length", "query_expansion")
        marks = (
            *keys, "do_query_expansion", "attend_to_expansion_tokens", "attend_to_mask_tokens", "query_prefix",
            "document_prefix", "skiplist_words",
        )  # fmt: skip
        if not any(key in settings for key in marks):
            return cls()
        known = {
            key: settings[key]
            for key in keys
            if key in settings and (settings[key] is not None or key == "query_expansion")
        }
        if "query_expansion" not in known:
            length = known.pop("query_length", None) or 32
            attend = settings.get("attend_to_expansion_tokens", settings.get("attend_to_mask_tokens"))
            off = settings.get("do_query_expansion") is False
            if off:
                known |= {"query_length": settings["query_length"]} if settings.get("query_length") else {}
            known["query_expansion"] = None if off else _expansion(length, attend)
        prefixes = {
            task: settings[f"{task}_prefix"] or "" for task in ("query", "document") if f"{task}_prefix" in settings
        }
        skiplist = settings.get("skiplist_words")
        if settings.get("model_type") == _PYLATE and skiplist is None:
            skiplist = list(punctuation)
        return cls(known, prefixes, skiplist if settings.get("model_type") == _PYLATE else None)

    @classmethod
    def _stanford(cls, metadata: Mapping[str, Any]) -> _Legacy:
        known = {
            "query_expansion": _expansion(metadata.get("query_maxlen") or 32, metadata.get("attend_to_mask_tokens"))
        }
        if metadata.get("doc_maxlen") is not None:
            known["document_length"] = metadata["doc_maxlen"]
        prefixes = {
            "query": f"{metadata.get('query_token_id') or '[unused0]'} ",
            "document": f"{metadata.get('doc_token_id') or '[unused1]'} ",
        }
        return cls(known, prefixes, list(punctuation) if metadata.get("mask_punctuation", True) else [])

    @staticmethod
    def projection(checkpoint: Checkpoint) -> Module:
        """Return the linear layer of Stanford's ColBERT; its weights are stored with those of the network."""
        size = (checkpoint.json("artifact.metadata") or {}).get("dim") or -1
        return Module("Dense", "", {"module_input_name": TOKENS, "activation_function": "", "out_features": size})

    def appended(self) -> tuple[Module, ...]:
        """Return the modules that the folder implies."""
        if self.skiplist is None:
            return ()
        mask = Module("MultiVectorMask", "", {"skiplist_words": list(self.skiplist)})
        return mask, Module("Normalize", "", {"module_input_name": TOKENS})

    def prompts(self, saved: Mapping[str, str]) -> dict[str, str]:
        """Return the prompts that begin with a prefix, by task."""
        return {task: prefix + (saved.get(task) or "").removeprefix(prefix) for task, prefix in self.prefixes.items()}


def _expansion(length: int, attend: Any) -> dict[str, Any]:
    return {"strategy": "fixed", "attend": bool(attend), "length": length}


@dataclass(frozen=True, slots=True)
class _ModuleReader:
    """Reads the modules of a checkpoint; configurations lack the ``defaults`` of older multi-vector folders."""

    checkpoint: Checkpoint
    legacy: _Legacy

    def module(self, reference: Any, path: Any) -> Module:
        """Read the module of class ``reference`` in the folder ``path``."""
        source = self.checkpoint.source
        if not isinstance(reference, str) or not isinstance(path, str) or _leaves(path):
            raise invalid(f"'{source}': modules.json must have a class name and a folder of the checkpoint per module")
        path = path.strip("/") if path != "." else ""
        kind = reference.rpartition(".")[2]
        kind = _ALIASES.get(kind, kind)
        if not reference.startswith(_NAMESPACE) and reference not in _FOREIGN:
            raise unsupported(
                f"'{source}' has the module '{reference}', which is not a class of sentence-transformers; "
                "conch runs no Python code of modules"
            )
        if kind not in _SERVED:
            raise unsupported(
                f"'{source}' has the sentence-transformers module '{kind}', which is not supported; "
                f"the supported modules are {', '.join(sorted(_SERVED))}"
            )
        if kind == "Router":
            return self._router(path)
        if kind in NETWORKS:
            config = {**self.legacy.transformer, **self.checkpoint.transformer_config(path)}
            if not self.checkpoint.modules() and retrieval_head(self.checkpoint):
                config = {**_RETRIEVAL_CONFIG, **config}
            if kind == "CLIPModel":
                config = {**_CONTRASTIVE_CONFIG, **config}
                if not self.checkpoint.modules() and self.checkpoint.config.get("model_type") in _FILLED:
                    config["processing_kwargs"] = {"text": {"padding": "max_length"}}
            return _checked_network(source, Module(kind, path, config))
        optional = kind in ("StaticEmbedding", "SparseStaticEmbedding", "Normalize", "Dropout", "MultiVectorMask")
        config = self._config(path, optional=optional)
        if kind == "Dense" and family_of(self.checkpoint) == MULTI_VECTOR:
            config = {"module_input_name": TOKENS, **config}
        return Module(kind, path, config)

    def _router(self, path: str) -> Module:
        source = self.checkpoint.source
        document = self.checkpoint.json(joined(path, "router_config.json")) or self._config(path)
        types, structure = document.get("types"), document.get("structure")
        if not isinstance(types, dict) or not isinstance(structure, dict) or not structure:
            raise invalid(f"'{source}': the configuration of the Router in '{path or '.'}' has no routes")
        modules = {name: self.module(reference, joined(path, name)) for name, reference in types.items()}
        try:
            routes = {route: tuple(modules[name] for name in names) for route, names in structure.items()}
        except KeyError as error:
            raise invalid(f"'{source}': a route of the Router in '{path or '.'}' has no module {error}") from None
        return Module("Router", path, document.get("parameters") or {}, routes)

    def _config(self, path: str, *, optional: bool = False) -> dict[str, Any]:
        config = self.checkpoint.json(joined(path, "config.json")) if path or not optional else {}
        if config is None and not optional:
            raise invalid(f"'{self.checkpoint.source}' lacks {path}/config.json, which modules.json names")
        return config or {}


def _leaves(path: str) -> bool:
    """Whether a path of a module leads outside the checkpoint, in the syntax of any system."""
    parsed = PureWindowsPath(path)
    return bool(parsed.anchor) or ".." in parsed.parts or "\0" in path


def _checked_network(source: str, module: Module) -> Module:
    """Return a Transformer module. Raises UNSUPPORTED for one that reads texts without its tokenizer."""
    config = module.config
    inputs = config.get("modality_config") or {"text": {}}
    text = inputs.get("text")
    method = text.get("method", "forward") if isinstance(text, dict) else None
    if "message" in inputs or (method != "forward" and module.methods is None):
        what = "texts as chat messages" if "message" in inputs else f"{', '.join(inputs)} through {method}"
        raise unsupported(f"'{source}': its Transformer module reads {what}, which is not supported")
    processing = {
        f"{group}.{name}"
        for group, values in (config.get("processing_kwargs") or {}).items()
        for name in (values or {})
        if group in ("text", "common") and (group, name) not in (("text", "max_length"), ("text", "padding"))
    }
    if processing:
        raise unsupported(
            f"'{source}': its Transformer module has the processing_kwargs {', '.join(sorted(processing))}"
        )
    return module


def _routers(modules: Sequence[Module]) -> Iterator[Module]:
    for module in modules:
        if module.routes:
            yield module
            for route in module.routes.values():
                yield from _routers(route)


def _mappings(router: Module) -> dict[tuple[str | None, Any], str]:
    """Return ``route_mappings`` of a Router: routes by task and modality, which are written as Python tuples."""
    mappings: dict[tuple[str | None, Any], str] = {}
    for key, route in (router.config.get("route_mappings") or {}).items():
        try:
            task, modality = ast.literal_eval(key)
        except (ValueError, SyntaxError, TypeError):
            continue
        mappings[task, tuple(sorted(modality)) if isinstance(modality, tuple) else modality] = str(route)
    return mappings


def _route(router: Module, task: str | None) -> str:
    """Return the name of the route of texts with ``task``; empty if there is none."""
    mappings, modality = _mappings(router), "text"
    for key in ((task, modality), (task, None), (None, modality), (None, None)):
        if key in mappings:
            return mappings[key] if mappings[key] in router.routes else ""
    for name in (task, modality):
        if name and name in router.routes:
            return name
    if task is not None:
        return ""
    default = router.config.get("default_route")
    if default is None and router.config.get("allow_empty_key", True):
        default = next(iter(router.routes))
    return str(default) if default in router.routes else ""


def _flat(modules: Sequence[Module], task: str | None) -> tuple[Module, ...] | None:
    """Return ``modules`` with Routers replaced by their routes for ``task``; None if one of them has no route."""
    flat: tuple[Module, ...] = ()
    for module in modules:
        own = _flat(module.routes.get(_route(module, task), ()), task) if module.routes else (module,)
        if not own:
            return None
        flat += own
    return flat


def _check(checkpoint: Checkpoint, modules: Sequence[Module], family: str) -> None:
    """Raise INVALID_ARG unless the first of ``modules`` reads texts, and each finds the feature that it reads."""
    source = checkpoint.source
    if not modules or modules[0].kind not in READERS:
        raise invalid(f"'{source}': the module '{modules[0].kind if modules else ''}' comes first, and reads no text")
    features = {modules[0].target if modules[0].kind in NETWORKS else SENTENCE}
    for module in modules[1:]:
        if module.kind in NETWORKS or module.kind == "StaticEmbedding":
            raise unsupported(f"'{source}' has the module '{module.kind}' after another one")
        if module.kind in ("Dropout", "WeightedLayerPooling", "MultiVectorMask", "HierarchicalTokenPooling"):
            continue
        if module.kind == "Normalize" and module.source not in features:
            continue
        if module.kind != "SparseStaticEmbedding" and module.source not in features:
            raise invalid(
                f"'{source}': the module '{module.kind}' reads {module.source}, which no module before it gives"
            )
        features.add(SENTENCE if module.kind == "SparseStaticEmbedding" else module.target)
    needed = TOKENS if family == MULTI_VECTOR else SENTENCE
    if needed not in features:
        raise invalid(f"'{source}': its modules produce {', '.join(sorted(features))}, not {needed}")


def _size(checkpoint: Checkpoint, modules: Sequence[Module]) -> int:
    """Return the size of the vectors that ``modules`` compute; -1 if it does not follow from configurations."""
    size = -1
    for module in modules:
        config = module.config
        match module.kind:
            case "Transformer" | "MLMTransformer" | "CLIPModel":
                saved = checkpoint.gguf is None
                document = checkpoint.json(joined(module.path, "config.json")) or {} if saved else checkpoint.config
                inner = document.get("text_config")
                names: Sequence[str] = ("vocab_size",) if predicts_tokens(module) else _SIZES
                if module.methods is not None:
                    filled = document.get("model_type") in _FILLED
                    names = ("projection_size", "hidden_size") if filled else ("projection_dim", "embedding_dim")
                documents = (document, inner if isinstance(inner, dict) else {})
                sizes = (entry[name] for entry in documents for name in names if isinstance(entry.get(name), int))
                size = next(sizes, -1)
            case "Pooling":
                size = size * len(module.modes) if size > 0 else -1
            case "Dense":
                size = int(config.get("out_features", -1))
            case "SparseAutoEncoder":
                size = int(config.get("hidden_dim", 512))
    return size


def divided_for_graph(modules: Sequence[Module]) -> tuple[tuple[Module, ...], tuple[Module, ...]]:
    """Return the modules after a network that a graph can contain, and those that run on its outputs.

    Which tokens count depends on the task, and pooling of tokens by their likeness on the data.
    """
    kinds = [module.kind for module in modules]
    end = kinds.index("HierarchicalTokenPooling") if "HierarchicalTokenPooling" in kinds else len(kinds)
    masks = [module for module in modules[:end] if module.kind == "MultiVectorMask"]
    return tuple(module for module in modules[:end] if module not in masks), (*masks, *modules[end:])


def includes_prompt(module: Module) -> bool:
    """Whether a Pooling module pools the tokens of a prompt."""
    return bool(module.config.get("include_prompt", True))


def predicts_tokens(module: Module) -> bool:
    """Whether the network of a Transformer module is a masked language model."""
    default = "fill-mask" if module.kind == "MLMTransformer" else ""
    return str(module.config.get("transformer_task", default)) == "fill-mask"
