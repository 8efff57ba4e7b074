"""The pipelines of an embedding model: a list of modules that a text goes through, with or without a network.

A pipeline tokenises the texts of a request (``prepare``) and embeds requests together (``execute``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any, Final, NamedTuple

import numpy as np

from conch.backends.base.arrays import Array, Request, Result
from conch.backends.tasks.encoders.encoder_task import EncodedRequest, EncoderNetwork, PaddedBatch, completed
from conch.backends.tasks.engines import (
    HIDDEN_STATES,
    POOLED,
    POOLED_LOGITS,
    TOKEN_VECTORS,
    TOKEN_WEIGHTS,
)
from conch.backends.tasks.retrieval.outputs import COUNT, HIDDEN_STATE, Values, tensors_of, values_of
from conch.backends.tasks.task import ExecutionWork, OpenEngine
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.heads import TokenHeads, sparse_rows, vector_rows
from conch.checkpoints.modules import (
    DENSE,
    FEATURES,
    MULTI_VECTOR,
    SENTENCE,
    SPARSE,
    TOKENS,
    EmbeddingModel,
    Module,
    divided_for_graph,
    includes_prompt,
    joined,
    predicts_tokens,
    retrieval_head,
)
from conch.checkpoints.pooling import splade_settings
from conch.checkpoints.steps import (
    IDS,
    LAYERS,
    MASK,
    Features,
    Steps,
    Vocabulary,
)
from conch.checkpoints.tokenizers.inputs import InputEncoder, read_truncation, too_long_error
from conch.checkpoints.tokenizers.open import open_tokenizer
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer, Tokens, refused
from conch.checkpoints.tokenizers.words import WordIds, divides_at_spaces
from conch.core.errors import ConchError, invalid, unsupported
from conch.core.lengths import CPU_TOKENS, runs
from conch.core.text_parameters import REFUSE, TRUNCATION
from conch.machine import extras

#: Names of the output with a vector per token in exported graphs.
HIDDEN: Final = ("last_hidden_state", TOKENS, "logits")
#: Encoder-decoder models; sentence-transformers uses only their encoder.
ENCODER_DECODERS: Final = frozenset({"t5", "mt5", "umt5", "longt5"})


class TextRequest(EncodedRequest):
    """An encoded request with its ``pipeline`` and ``task``; ``state`` has the tokens of its prompt."""

    __slots__ = ("pipeline", "task")

    pipeline: Pipeline
    task: str | None


class PromptTokens(NamedTuple):
    """The number of prompt tokens at the start of a text, with special ones; truncation leaves at least ``kept``."""

    length: int = 0
    kept: int = 0

    def of(self, tokens: Tokens) -> int:
        """Return the number of prompt tokens at the start of ``tokens``."""
        return max(self.kept, self.length - max(0, tokens.length - len(tokens.ids)))


class Pipeline(ABC):
    """Embeds texts by one list of modules of ``model``."""

    model: EmbeddingModel
    #: Whether it can give ``last_hidden_state``.
    gives_hidden_state: bool = False

    @property
    def limits(self) -> dict[str, int | str]:
        """The limits of a run and of a text, reported as runtime facts."""
        return {}

    @property
    @abstractmethod
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the first module."""

    @abstractmethod
    def prepare(self, request: Request, texts: Sequence[str], prompt: str, task: str | None) -> TextRequest:
        """Tokenise ``texts``, each after ``prompt``. Raises INVALID_ARG for a text that cannot be tokenised."""

    @abstractmethod
    def execute(self, batch: Sequence[Any], work: ExecutionWork) -> list[Result | ConchError]:
        """Embed all texts of ``batch``; returns the results in order. Takes what ``prepare`` returned."""


def result_of(encoded: EncodedRequest, values: list[Any]) -> Result:
    """Build the result of a request from the values of its texts."""
    result = Result({**tensors_of(values)})
    if COUNT.name in encoded.request.outputs:
        result.outputs[COUNT.name] = np.array([[len(item.ids)] for item in encoded.sequences], np.uint32)
    return result


class NetworkPipeline(EncoderNetwork, Pipeline):
    """Embeds texts by a network and the steps after it."""

    def __init__(
        self, checkpoint: Checkpoint, model: EmbeddingModel, modules: Sequence[Module], open_engine: OpenEngine
    ) -> None:
        first, *others = modules
        self.model, self._module = model, first
        part = checkpoint.part(first.path)
        super().__init__(part, open_network(checkpoint, part, first, others, open_engine))
        self._hidden = (POOLED_LOGITS, output_of(first), *HIDDEN)
        #: The output of graphs that contain the modules.
        self._final = TOKEN_VECTORS if model.family == MULTI_VECTOR else POOLED
        self._final_outputs = (self._final, TOKEN_WEIGHTS, TOKEN_VECTORS) if model.heads else (self._final,)
        self._check_outputs(checkpoint)
        by_token = (output_of(first), *HIDDEN)
        self.gives_hidden_state = model.family == DENSE and all(
            any(name in engine.outputs for name in by_token) for engine in self.engine.parts
        )
        tokenizer = self.encoder.tokenizer
        # After the checks at load, which compare with transformers' tokenizer as it is.
        self._lower = bool(first.config.get("do_lower_case")) and not lower_case(tokenizer)
        keep_whole(tokenizer, model.prefixes)
        vocabulary = vocabulary_of(tokenizer)
        #: The steps after a graph that contains the modules.
        self._masks = Steps(checkpoint, divided_for_graph(others)[1], vocabulary)
        self._steps, self._heads = self._masks, None
        if any(self._final not in engine.outputs for engine in self.engine.parts):
            pooled = any(POOLED_LOGITS in engine.outputs for engine in self.engine.parts)
            self._steps = Steps(checkpoint, others[1:] if pooled else others, vocabulary)
            self._heads = TokenHeads(checkpoint) if model.heads else None
        special = tokenizer.special
        unused = (special.cls_id, special.bos_id, special.pad_id, special.unk_id, *special.eos_ids)
        self._unused_ids = np.array(sorted({id for id in unused if id is not None}), np.int64)
        self._pools_prompt = all(includes_prompt(module) for module in others if module.kind == "Pooling")
        self._expansion = first.config.get("query_expansion") or {}
        self._encoders = self._encoders_by_task()

    def _check_outputs(self, checkpoint: Checkpoint) -> None:
        """Raise UNSUPPORTED for an engine without an output to embed texts by, or with options that it ignores."""
        options = checkpoint.options
        for engine in self.engine.parts:
            if self._final in engine.outputs:
                if options.pooling or options.normalize is False:
                    name = "pooling" if options.pooling else "normalize"
                    raise unsupported(
                        f"'{checkpoint.source}': parameter '{name}' has no effect on engine '{engine.name}', whose "
                        "graph contains the modules of the checkpoint: choose engine torch"
                    )
                if self.model.heads and TOKEN_WEIGHTS not in engine.outputs:
                    raise unsupported(
                        f"'{checkpoint.source}' has the heads of BGE-M3, which the graph of '{engine.name}' lacks"
                    )
            elif not any(name in engine.outputs for name in self._hidden):
                raise unsupported(
                    f"'{checkpoint.source}' returns {', '.join(engine.outputs)}; an embedding needs "
                    f"{' or '.join((*HIDDEN, self._final))}"
                )

    def _encoders_by_task(self) -> dict[str | None, InputEncoder]:
        """Return the encoder of each task, which differ by the maximum length of a text."""
        own, config = self.encoder, self._module.config
        fixed = ((config.get("processing_kwargs") or {}).get("text") or {}).get("max_length")
        lengths = {"query": config.get("query_length"), "document": config.get("document_length")}
        if self._expansion:
            floor = int(self._expansion["length"])
            if self._expansion["strategy"] == "fixed":
                lengths["query"] = floor
            elif lengths["query"] is not None:
                lengths["query"] = max(int(lengths["query"]), floor)
        encoders: dict[str | None, InputEncoder] = {None: own}
        for task, length in (None, fixed), *lengths.items():
            length = fixed if fixed is not None and not (task == "query" and self._expansion) else length
            if length is not None:
                limit = min(int(length), self.checkpoint.positions or int(length))
                encoders[task] = own.limited(limit)
        self.encoder = max(encoders.values(), key=lambda encoder: encoder.max_length)
        return encoders

    def prepare(self, request: Request, texts: Sequence[str], prompt: str, task: str | None) -> TextRequest:
        texts = [prompt + text for text in texts] if prompt else texts
        if self._lower:
            texts = [text.lower() for text in texts]
        encoder = self._encoders.get(task, self._encoders[None]).requested(request.parameters)
        sequences, truncated = self.encode(encoder, texts)
        skipped = PromptTokens()
        if prompt and not self._pools_prompt:
            skipped = self._prompt_tokens(prompt, encoder)
            if truncated:
                self._require_text(sequences, skipped, encoder)
        if task == "query" and self._expansion:
            sequences = [self._expanded(tokens) for tokens in sequences]
        prepared = TextRequest(request, sequences, truncated, skipped)
        prepared.pipeline, prepared.task = self, task
        return prepared

    def encode(self, encoder: InputEncoder, texts: Sequence[str]) -> tuple[list[Tokens], int]:
        """Return the tokens of texts, and the number of texts that were truncated."""
        return encoder.encode(texts)

    def _prompt_tokens(self, prompt: str, encoder: InputEncoder) -> PromptTokens:
        """Return the tokens of ``prompt`` in texts of ``encoder``; on the left, truncation removes them first."""
        special = self.encoder.tokenizer.special.all_ids
        ids = self._encoders[None].encode([prompt.lower() if self._lower else prompt])[0][0].ids.tolist()
        length = len(ids) - (ids[-1] in special)
        return PromptTokens(length, length if encoder.side == "right" else len([*takewhile(special.__contains__, ids)]))

    def _require_text(self, sequences: Sequence[Tokens], prompt: PromptTokens, encoder: InputEncoder) -> None:
        """Raise INVALID_ARG if truncation left only the prompt, which is not pooled."""
        special = self.encoder.tokenizer.special.all_ids
        for row, tokens in enumerate(sequences):
            text = len(tokens.ids) - (int(tokens.ids[-1]) in special) - prompt.of(tokens)
            if len(tokens.ids) < tokens.length and text < 1:
                raise invalid(
                    f"a maximum of {encoder.max_length} tokens leaves only the prompt of row {row}, and the model does "
                    f"not pool prompts, of which this one has {prompt.length} tokens"
                )

    def _expanded(self, tokens: Tokens) -> Tokens:
        """Return a query, as ColBERT expands it: filled with mask tokens up to a number of tokens."""
        count = int(self._expansion["length"]) - len(tokens.ids)
        if count <= 0:
            return tokens
        special = self.encoder.tokenizer.special
        token = self._expansion.get("token")
        filler = vocabulary_of(self.encoder.tokenizer).id_of(token) if token else special.mask_id
        if filler is None:
            filler = next(iter(special.eos_ids), self.encoder.pad_id)
        ids = np.concatenate([tokens.ids, np.full(count, filler, np.int64)])
        types = None if tokens.types is None else np.concatenate([tokens.types, np.zeros(count, np.int64)])
        expanded = Tokens(ids, types, tokens.length)
        if not self._expansion.get("attend"):
            expanded.mask = np.concatenate([np.ones(len(tokens.ids), np.int64), np.zeros(count, np.int64)])
        return expanded

    def compute(self, arrays: dict[str, Array], batch: PaddedBatch, work: ExecutionWork) -> dict[str, Array]:
        return self.engine.run(arrays, () if _names_hidden_state(batch) else self._final_outputs)

    def extract(self, outputs: Mapping[str, Array], batch: PaddedBatch) -> Iterable[Any]:
        count = len(batch.sequences)
        arrays = {MASK: batch.mask, IDS: batch.ids[:count]}
        steps = self._steps
        if self._final in outputs:
            arrays[TOKENS if self._final == TOKEN_VECTORS else SENTENCE] = outputs[self._final]
            steps = self._masks
        elif POOLED_LOGITS in outputs:
            arrays[SENTENCE] = outputs[POOLED_LOGITS]
        else:
            arrays[self._module.target] = outputs[next(name for name in self._hidden if name in outputs)]
        if HIDDEN_STATES in outputs:
            arrays[LAYERS] = outputs[HIDDEN_STATES]
        expansion = None
        if self._expansion:
            lengths = np.array([len(sequence.ids) for sequence in batch.sequences])
            expansion = (np.arange(batch.ids.shape[1]) < lengths[:, None]) & (batch.mask == 0)
        features = Features(
            arrays,
            padded=batch.padded,
            prompt_lengths=[
                request.state.of(tokens) for request, tokens in zip(batch.requests, batch.sequences, strict=True)
            ],
            tasks=[request.task for request in batch.requests],
            expansion=expansion,
        )
        hidden = arrays.get(TOKENS)
        values = values_of(self.model, steps(features))
        if not self.model.heads:
            return self._with_hidden_states(values, outputs, batch)
        if self._heads is not None and hidden is not None:
            weights, vectors = self._heads(hidden)
        else:
            weights, vectors = outputs[TOKEN_WEIGHTS], outputs[TOKEN_VECTORS]
        sparse = sparse_rows(weights, arrays[IDS], batch.mask, self._unused_ids)
        rows = zip(values, sparse, vector_rows(vectors, batch.mask), strict=True)
        values = [{**own, SPARSE: weights, MULTI_VECTOR: tokens} for own, weights, tokens in rows]
        return self._with_hidden_states(values, outputs, batch)

    def _with_hidden_states(
        self, values: Iterable[Values], outputs: Mapping[str, Array], batch: PaddedBatch
    ) -> Iterable[Values]:
        """Add the output of the network for each token of the texts whose requests name it."""
        name = HIDDEN_STATE.name
        if not _names_hidden_state(batch):
            return values
        hidden = batch.rows(outputs[next(name for name in self._hidden if name in outputs)])
        return [
            {**own, name: tokens.copy()} if name in request.request.outputs else own
            for own, tokens, request in zip(values, hidden, batch.requests, strict=True)
        ]

    def assemble(self, encoded: EncodedRequest, values: list[Any]) -> Result:
        return result_of(encoded, values)


def _names_hidden_state(batch: PaddedBatch) -> bool:
    return any(HIDDEN_STATE.name in request.request.outputs for request in batch.requests)


def open_network(
    checkpoint: Checkpoint, part: Checkpoint, module: Module, others: Sequence[Module], open_engine: OpenEngine
) -> Any:
    """Open the engine of a Transformer module, with the outputs that the modules after it read."""
    task = str(module.config.get("transformer_task") or "")
    if task not in ("", "feature-extraction", "fill-mask", "retrieval"):
        raise unsupported(f"'{checkpoint.source}': its Transformer module has the task '{task}', which embeds no text")
    settings: dict[str, Any] = {} if part is checkpoint else {"part": part}
    if module.methods is not None:
        settings["methods"] = module.methods
    if task == "retrieval":
        if not (head := retrieval_head(part)):
            raise unsupported(f"'{checkpoint.source}': its Transformer module has no network for pages of documents")
        return open_engine(head, outputs=(output_of(module),), **settings)
    if predicts_tokens(module):
        if others and others[0].kind == "SpladePooling":
            settings["splade"] = splade_settings(others[0])
        return open_engine(head_of_module(part, module), **settings)
    output = output_of(module)
    layers = any(other.kind == "WeightedLayerPooling" for other in others) and gives_layers(part, module)
    if layers:
        settings["outputs"] = (output, HIDDEN_STATES)
    elif output != HIDDEN[0]:
        settings["outputs"] = (output,)
    engine = open_engine(head_of_module(part, module), **settings)
    if layers and POOLED not in engine.outputs and TOKEN_VECTORS not in engine.outputs:
        engine.require_outputs((HIDDEN_STATES,), checkpoint.source)
    return engine


def head_of_module(part: Checkpoint, module: Module) -> str:
    """Return the class of transformers that loads the network of a Transformer module in the checkpoint ``part``."""
    if predicts_tokens(module):
        return "AutoModelForMaskedLM"
    encodes = part.config.get("model_type") in ENCODER_DECODERS
    return "AutoModelForTextEncoding" if encodes else "AutoModel"


def gives_layers(part: Checkpoint, module: Module) -> bool:
    """Whether the configuration of a network requests the outputs of all layers; else weighting has no effect."""
    name = "output_hidden_states"
    arguments = module.config.get("config_kwargs") or module.config.get("config_args") or {}
    return bool(arguments.get(name, part.config.get(name)))


def output_of(module: Module) -> str:
    """Return the output of the network that a Transformer module passes to the next modules."""
    named = (module.config.get("modality_config") or {}).get("text") or {}
    own = "logits" if predicts_tokens(module) else HIDDEN[0] if module.methods is None else FEATURES
    return str(named.get("method_output_name") or own)


def lower_case(tokenizer: TextTokenizer) -> bool:
    """Make a tokenizer of ``tokenizers`` convert texts to lower case first; false for a tokenizer in Python."""
    if tokenizer.fast is None:
        return False
    from tokenizers import normalizers

    own = tokenizer.fast.normalizer
    parts = [normalizers.Lowercase()] + ([own] if own is not None else [])
    tokenizer.fast.normalizer = normalizers.Sequence(parts)
    tokenizer.reread()
    return True


def keep_whole(tokenizer: TextTokenizer, prefixes: Sequence[str]) -> None:
    """Make tokens that begin a prompt, such as ``[unused0]``, special, so that they are not divided."""
    fast = tokenizer.fast
    for prefix in prefixes:
        if fast is None or not prefix.split():
            continue
        for token in (prefix, prefix.split(None, 1)[0]):
            id = fast.token_to_id(token)
            if id is None:
                continue
            if tokenizer.encode(token, special_tokens=False) != [id]:
                from tokenizers import AddedToken

                fast.add_special_tokens([AddedToken(token, normalized=False, special=True)])
                tokenizer.reread()
            break


def vocabulary_of(tokenizer: TextTokenizer) -> Vocabulary:
    """Return the tokens of a tokenizer; the token of unknown words is none of them."""
    fast = tokenizer.fast
    if fast is None:
        return Vocabulary()
    return Vocabulary(fast.get_vocab_size(), fast.token_to_id)


class TablePipeline(Pipeline):
    """Embeds texts by tables with a row for each token, without a network."""

    def __init__(self, checkpoint: Checkpoint, model: EmbeddingModel, modules: Sequence[Module]) -> None:
        self.model = model
        first = modules[0]
        self._part = checkpoint.part(first.path)
        self._limit = 0
        self._fast: Any
        #: Whether its first module averages the vectors of tokens, which needs no padding.
        self._averages = first.kind == "StaticEmbedding"
        if self._averages:
            self._fast = self._own_tokenizer(checkpoint, first)
        else:
            self._fast = self.tokenizer.fast
            if self._fast is None:
                raise unsupported(f"'{checkpoint.source}': the tokenizer of SparseStaticEmbedding is written in Python")
            settings = self._part.json("tokenizer_config.json") or {}
            limit = settings.get("model_max_length")
            self._limit = int(limit) if isinstance(limit, int | float) and 0 < limit < 10**9 else 0
        self._limit = min(filter(None, (checkpoint.options.max_length, self._limit)), default=0)
        self._truncation = checkpoint.options.truncation
        self._words = WordIds(self._fast) if divides_at_spaces(self._fast) else None
        self._steps = Steps(checkpoint, modules, Vocabulary(self._fast.get_vocab_size(), self._fast.token_to_id))
        self._budget = checkpoint.options.max_batch_tokens or CPU_TOKENS

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        return open_tokenizer(self._part)

    def _own_tokenizer(self, checkpoint: Checkpoint, module: Module) -> Any:
        path = checkpoint.path(joined(module.path, "tokenizer.json"))
        if path is None:
            raise invalid(f"'{checkpoint.source}' lacks {joined(module.path, 'tokenizer.json')}, of StaticEmbedding")
        extras.require(str(path), "tokenizers", extra=checkpoint.extra)
        from tokenizers import Tokenizer

        try:
            fast: Any = Tokenizer.from_file(str(path))
        except Exception as error:
            raise invalid(f"the tokenizer of '{checkpoint.source}' cannot be read: {path}: {error}") from None
        self._limit = (fast.truncation or {}).get("max_length", 0)
        fast.no_truncation()
        fast.no_padding()
        return fast

    @property
    def limits(self) -> dict[str, int | str]:
        limits: dict[str, int | str] = {"max_length": self._limit} if self._limit else {}
        return {**limits, TRUNCATION: REFUSE} if self._truncation == REFUSE else limits

    def prepare(self, request: Request, texts: Sequence[str], prompt: str, task: str | None) -> TextRequest:
        texts = [prompt + text for text in texts] if prompt else texts
        truncation, limit = read_truncation(request.parameters)
        truncation = truncation or self._truncation
        limit = min(filter(None, (limit, self._limit)), default=0)
        encode = self._words.encode if self._words is not None else _library_ids
        truncated = 0
        sequences: list[Tokens] = []
        for ids in encode(texts, self._encodings):
            length = len(ids)
            if 0 < limit < length:
                if truncation == REFUSE:
                    raise too_long_error("input 'text_input'", len(sequences), length, limit)
                ids, truncated = ids[-limit:] if truncation == "left" else ids[:limit], truncated + 1
            sequences.append(Tokens(ids, None, length))
        prepared = TextRequest(request, sequences, truncated, PromptTokens())
        prepared.pipeline, prepared.task = self, task
        return prepared

    def _encodings(self, texts: Sequence[str]) -> list[Any]:
        try:
            encodings: list[Any] = self._fast.encode_batch_fast(texts, add_special_tokens=False)
        except BaseException as error:
            raise refused(error, "input 'text_input'") from None
        return encodings

    def execute(self, batch: Sequence[Any], work: ExecutionWork) -> list[Result | ConchError]:
        sequences = [sequence for request in batch for sequence in request.sequences]
        tasks = [request.task for request in batch for _ in request.sequences]
        lengths = np.array([len(sequence.ids) for sequence in sequences])
        values: list[Any] = [None] * len(sequences)
        for indices in self._divide(lengths):
            own, ids = lengths[indices], np.concatenate([sequences[index].ids for index in indices])
            features = Features({IDS: ids}, lengths=own) if self._averages else _padded(ids, own)
            features.tasks = [tasks[index] for index in indices]
            work.add(int(own.sum()), features.arrays[IDS].size, len(indices))
            for index, value in zip(indices, values_of(self.model, self._steps(features)), strict=True):
                values[index] = value
        results: list[Result | ConchError] = []
        start = 0
        for request in batch:
            end = start + len(request.sequences)
            results.append(completed(request, values[start:end], result_of))
            start = end
        return results

    def _divide(self, lengths: Array) -> list[list[int]]:
        """Return the indices of the texts of each run; without padding, one run has all."""
        if self._averages:
            return [list(range(len(lengths)))]
        return runs(np.maximum(lengths, 1).tolist(), budget=self._budget)


def _padded(ids: Array, lengths: Array) -> Features:
    """Return the features of texts, whose ``ids`` follow one another."""
    longest = int(lengths.max())
    mask = (np.arange(longest) < lengths[:, None]).astype(np.int64)
    padded = np.zeros(mask.shape, np.int64)
    padded[mask > 0] = ids
    return Features({IDS: padded, MASK: mask}, padded=bool((lengths < longest).any()))


def _library_ids(texts: Sequence[str], encode: Callable[[Sequence[str]], list[Any]]) -> list[Array]:
    return [np.array(encoding.ids, np.int64) for encoding in encode(texts)]
