"""The method of speculative decoding, and the draft model, whose tokens must be those of the model."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from conch.backends.generation.engine import EngineSpec
from conch.checkpoints import files
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.gguf import config_of, read_gguf
from conch.checkpoints.options import Options
from conch.checkpoints.tokenizers.open import open_tokenizer
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer
from conch.core.errors import ConchError, invalid

#: The values of parameter ``speculative_method``, by vLLM's names.
METHODS: Final = ("draft_model", "ngram")
#: Words in the configuration of heads that propose tokens from the hidden states of a model.
_HEADS: Final = re.compile("eagle|medusa|speculator|mtp", re.IGNORECASE)


def speculative_method(options: Options) -> str:
    """Return the method of speculative decoding, empty if none. Raises INVALID_ARG for contradictory parameters."""
    named, model = options.text("speculative_method"), options.text("speculative_model")
    method = named or ("draft_model" if model else "")
    if method not in ("", *METHODS):
        raise invalid(f"parameter 'speculative_method' is '{method}'; it must be one of {', '.join(METHODS)}")
    if method == "draft_model" and not model:
        raise invalid("parameter 'speculative_method' is 'draft_model', but 'speculative_model' names no model")
    if method == "ngram" and model:
        raise invalid("parameter 'speculative_method' is 'ngram', which needs no 'speculative_model'")
    return method


def draft_spec(spec: EngineSpec, engine: str) -> EngineSpec:
    """Return the spec of the draft model of ``spec``, for the same engine and its files.

    Raises INVALID_ARG for heads on the hidden states of the model, and for a folder that is not a checkpoint.
    """
    assert spec.draft is not None
    options = Options.from_values({"model": str(spec.draft), "task": "text-generation", "engine": engine})
    config = _open(spec.draft, options).config
    kinds = [str(config.get("model_type", "")), *map(str, config.get("architectures") or ())]
    if kind := next((kind for kind in kinds if _HEADS.search(kind)), ""):
        raise invalid(
            f"parameter 'speculative_model': engine '{engine}' supports draft models, but no heads such as '{kind}' of "
            f"{spec.draft}"
        )
    checkpoint = Checkpoint.open(spec.directory, options, model_file={})
    graph = checkpoint.graph_file("openvino")
    return replace(
        spec,
        directory=graph.parent if graph is not None else checkpoint.directory,
        config=checkpoint.config,
        gguf=checkpoint.gguf,
        context=checkpoint.positions,
        adapters={},
        adapter_folders=(),
        speculative="",
        draft=None,
        projector=None,
    )


def find_draft(checkpoint: Checkpoint, tokenizer: TextTokenizer | None) -> Path | None:
    """Return the draft model that a checkpoint's options name, or None.

    Raises INVALID_ARG for a path that is not a model, and for a model whose tokens differ from those of ``tokenizer``.
    Heads without a tokenizer are compared by the size of the vocabulary in config.json.
    """
    named = checkpoint.options.text("speculative_model")
    if not named:
        return None
    path = checkpoint.named_path("speculative_model", named)
    draft = _open(path, checkpoint.options)
    if tokenizer is not None and _has_tokenizer(draft):
        difference = _difference(tokenizer, open_tokenizer(draft))
    else:
        ours, theirs = _size(checkpoint.config), _size(draft.config)
        difference = f"{theirs} tokens, and the model has {ours}" if ours and theirs and ours != theirs else ""
    if difference:
        raise invalid(
            f"parameter 'speculative_model': the vocabulary of the draft model {path} differs from the model's: "
            f"{difference}"
        )
    return path


def _open(path: Path, options: Options) -> Checkpoint:
    """Open a draft model without its weights."""
    gguf = files.gguf_file(path) if path.is_dir() else path
    if gguf is not None:
        file = read_gguf(gguf)
        return Checkpoint(gguf.parent, str(path), "", config_of(file), options, gguf=file)
    draft = Checkpoint(path, str(path), "", {}, options)
    config = draft.json("config.json")
    if config is None:
        raise invalid(f"parameter 'speculative_model': the draft model {path} lacks config.json")
    draft.config = config
    return draft


def _has_tokenizer(draft: Checkpoint) -> bool:
    if draft.gguf is not None:
        return bool(draft.gguf.texts("tokenizer.ggml.tokens"))
    try:
        files.require_tokenizer(draft.directory)
    except ConchError:
        return False
    return True


def _difference(tokenizer: TextTokenizer, draft: TextTokenizer) -> str:
    """Describe the first difference of two vocabularies; empty if there is none."""
    if tokenizer.vocabulary != draft.vocabulary:
        return f"{draft.vocabulary} tokens, and the model has {tokenizer.vocabulary}"
    for id in range(tokenizer.vocabulary):
        ours, theirs = tokenizer.token(id), draft.token(id)
        if ours != theirs:
            return f"token {id} is {theirs[:100]!r}, and {ours[:100]!r} in the model"
    return ""


def _size(config: dict[str, Any]) -> int:
    """Return the size of the vocabulary in a configuration, 0 if none."""
    inner = config.get("text_config")
    sizes = [part.get("vocab_size") for part in (config, inner) if isinstance(part, dict)]
    return next((size for size in sizes if type(size) is int), 0)
