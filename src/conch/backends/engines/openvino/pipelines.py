"""Builds the pipelines of the engine ``openvino``, their number formats and their tokenizer. Runs in workers.

OpenVINO GenAI computes the masks of grammars from the tokenizer's token list. The list must contain tokens as they
appear in a text. The lists of SentencePiece and similar tokenizers have ``▁`` for a space and ``<0x41>`` for a byte, so
that GenAI would find no token for a space.
"""

from __future__ import annotations

import json
import logging
import math
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from conch.backends.engines.openvino.gguf_weights import gguf_graph
from conch.backends.engines.openvino.precision import Precision
from conch.backends.generation.engine import EngineSpec
from conch.backends.graphs.openvino import reason
from conch.checkpoints.tokenizers.fast import token_bytes
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer
from conch.core.errors import ConchError, invalid
from conch.machine.temporary import TemporaryFolder

#: The files of a tokenizer in OpenVINO format, next to the graph.
TOKENIZER: Final = ("openvino_tokenizer.xml", "openvino_detokenizer.xml")
_SPACE: Final = "▁".encode()
_BYTE: Final = re.compile(rb"<0x([0-9A-F]{2})>")


def misfit(folder: Path, vocabulary: int) -> str:
    """Return why the tokenizer in ``folder`` does not fit a network with ``vocabulary`` logits; empty if it fits.

    GenAI does not check this: with more tokens than logits, its masks write past the end of the logits.
    """
    import openvino
    import openvino_tokenizers  # noqa: F401  (registers its operators)

    core: Any = openvino.Core()
    try:
        tokens = _tokens(_decoder(core.read_model(folder / TOKENIZER[1])))
    except RuntimeError:
        return "OpenVINO's tokenizer cannot be read"
    if not tokens:
        return "OpenVINO's tokenizer has no list of tokens"
    if len(tokens) > vocabulary:
        return f"the tokenizer has {len(tokens)} tokens and the network only {vocabulary}"
    return "" if b" " in tokens else "OpenVINO's tokenizer has no token for a space"


def spell(detokenizer: Any) -> None:
    """Rewrite the token list of a detokenizer with plain spaces and bytes; decoding does not change."""
    node = _decoder(detokenizer)
    tokens = _tokens(node)
    if b" " in tokens or _SPACE not in tokens:
        return
    special = set(node.input_value(4).get_node().data.tolist()) if node.get_input_size() > 4 else set()
    _replace(node, [token if id in special else _spelt(token) for id, token in enumerate(tokens)])


def _spelt(token: bytes) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes.fromhex(byte[1].decode()) if byte else token.replace(_SPACE, b" ")


def _decoder(detokenizer: Any) -> Any:
    """Return the operator with the token list, or None in a detokenizer of another kind."""
    return next((node for node in detokenizer.get_ops() if node.get_type_name() == "VocabDecoder"), None)


def _tokens(node: Any) -> list[bytes]:
    inputs = [] if node is None else [node.input_value(index).get_node() for index in (1, 2, 3)]
    if not inputs or any(node.get_type_name() != "Constant" for node in inputs):
        return []
    begins, ends, content = (node.data for node in inputs)
    text = content.tobytes()
    return [text[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]


def _replace(node: Any, tokens: Sequence[bytes]) -> None:
    from openvino import opset13

    ends = np.cumsum([len(token) for token in tokens], dtype=np.int32)
    begins = np.concatenate([np.zeros(1, np.int32), ends[:-1]])
    content = np.frombuffer(b"".join(tokens), np.uint8)
    for index, values in enumerate((begins, ends, content), start=1):
        node.input(index).replace_source_output(opset13.constant(values).output(0))


def lora(path: Path, graph: Path) -> Any:
    """Return GenAI's configuration of an adapter that is merged into the weights of ``graph`` at load.

    ``path`` is a folder or file saved by PEFT. Raises INVALID_ARG for an adapter that does not fit the graph.
    """
    import openvino_genai

    file = path / "adapter_model.safetensors" if path.is_dir() else path
    if not file.is_file():
        raise invalid(f"LoRA adapter {path} has no adapter_model.safetensors")
    _check_layers(file, graph.read_text())
    try:
        adapter: Any = openvino_genai.Adapter(file)
    except RuntimeError as error:
        raise invalid(f"LoRA adapter {path}: {reason(error)}") from None
    return openvino_genai.AdapterConfig(adapter, _scale(file), openvino_genai.AdapterConfig.Mode.MODE_STATIC)


def _scale(file: Path) -> float:
    """Return the factor of an adapter's matrices from adapter_config.json: alpha / rank, or 1 without that file.

    With rsLoRA the divisor is the square root of the rank. Raises INVALID_ARG for unsupported options.
    """
    beside = file.with_name("adapter_config.json")
    if not beside.is_file():
        return 1.0
    try:
        config = json.loads(beside.read_text())
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (ValueError, KeyError, TypeError):
        raise invalid(
            f"LoRA adapter {file.parent}: adapter_config.json must have numbers 'r' and 'lora_alpha'"
        ) from None
    for key in ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out"):
        if config.get(key):
            raise invalid(f"LoRA adapter {file.parent}: engine 'openvino' does not support {key}")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _check_layers(file: Path, graph: str) -> None:
    """Raise INVALID_ARG for weights of layers that the graph lacks; GenAI would ignore them silently."""
    try:
        with file.open("rb") as content:
            (size,) = struct.unpack("<Q", content.read(8))
            names = json.loads(content.read(size))
    except (ValueError, struct.error, MemoryError):
        raise invalid(f"LoRA adapter {file} is not a safetensors file") from None
    for name in sorted(set(names) - {"__metadata__"}):
        layer, separator, _ = name.partition(".lora_")
        layer = layer.removeprefix("base_model.model.")
        if not separator or not (f".{layer}/" in graph or f'"{layer}/' in graph):
            raise invalid(
                f"LoRA adapter {file.parent} has weights '{name}' that engine 'openvino' cannot add to the model"
            )


_logger = logging.getLogger(__name__)


def pipeline(
    spec: EngineSpec, tokenizer: Any, precision: Precision, blocks: int, batched: int, adapter: Path | None = None
) -> Any:
    """Build a pipeline with ``blocks`` blocks of KV cache and at most ``batched`` tokens per step.

    Raises INVALID_ARG for a model or adapter that cannot be loaded.
    """
    import openvino
    import openvino_genai

    scheduler: Any = openvino_genai.SchedulerConfig()
    scheduler.num_kv_blocks = blocks
    scheduler.max_num_batched_tokens = batched
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = spec.prefix_caching
    properties = precision.properties(spec.threads)
    properties["sampler_num_threads"] = properties["INFERENCE_NUM_THREADS"]
    if adapter is not None:
        properties["adapters"] = lora(adapter, spec.directory / "openvino_model.xml")
    with TemporaryFolder() as scratch:
        folder = spec.directory
        if spec.gguf is not None:
            folder = scratch
            openvino.save_model(gguf_graph(spec.gguf), scratch / "openvino_model.xml", compress_to_fp16=False)
        try:
            return openvino_genai.ContinuousBatchingPipeline(folder, tokenizer, scheduler, "CPU", **properties)
        except RuntimeError as error:
            raise invalid(f"engine 'openvino' cannot load {spec.source}: {reason(error)}") from None


def tokenizer(spec: EngineSpec) -> tuple[Any, bool]:
    """Return GenAI's tokenizer, and whether it has the model's vocabulary, which only grammars require.

    If the folder has no tokenizer in OpenVINO format, converts that of transformers if transformers is installed.
    """
    import openvino_genai

    with TemporaryFolder() as scratch:
        source = _fitting(spec, scratch) if spec.gguf is None else spec.gguf.path
        try:
            genai_tokenizer: Any = openvino_genai.Tokenizer(source or _empty(scratch))
        except RuntimeError:
            # Serve the model without grammars.
            source, genai_tokenizer = None, openvino_genai.Tokenizer(_empty(scratch))
        if source is not None and (problem := _misread(spec.tokenizer, genai_tokenizer)):
            _warn(spec, problem)
            source, genai_tokenizer = None, openvino_genai.Tokenizer(_empty(scratch))
        return genai_tokenizer, source is not None


def _misread(tokenizer: TextTokenizer | None, genai_tokenizer: Any) -> str:
    """Describe a token whose text differs in GenAI's tokenizer; empty if there is none."""
    if tokenizer is None or tokenizer.fast is None:
        return ""
    try:
        # GenAI lists only one of several tokens with the same text.
        read = {id: token for token, id in genai_tokenizer.get_vocab().items()}
        difference = token_bytes(tokenizer).difference(read)
    except ConchError as error:
        return error.message
    return f"in OpenVINO's tokenizer {difference}" if difference else ""


def _warn(spec: EngineSpec, problem: str) -> None:
    _logger.warning("no structured output for %s: %s", spec.source, problem)


def write_tokenizer(checkpoint: Path, folder: Path, *, trust_remote_code: bool = False) -> None:
    """Write the tokenizer of a checkpoint in OpenVINO format. Raises the errors of transformers and OpenVINO."""
    import openvino
    import openvino_tokenizers
    from transformers import AutoTokenizer

    fast: Any = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=trust_remote_code, local_files_only=True)
    models: Any = openvino_tokenizers.convert_tokenizer(fast, with_detokenizer=True)
    spell(models[1])
    for model, name in zip(models, TOKENIZER, strict=True):
        openvino.save_model(model, folder / name)


def _fitting(spec: EngineSpec, scratch: Path) -> Path | None:
    """Return the folder of a tokenizer in OpenVINO format that fits the model, or None."""
    complete = all((spec.directory / file).is_file() for file in TOKENIZER)
    folder = spec.directory if complete else _converted(spec, scratch)
    if folder is None:
        return None
    problem = misfit(folder, int(spec.config["vocab_size"]))
    if problem:
        _warn(spec, problem)
    return None if problem else folder


def _converted(spec: EngineSpec, scratch: Path) -> Path | None:
    """Convert tokenizer.json of the model's folder or its parent to ``scratch``; returns ``scratch``, or None."""
    folders = [folder for folder in (spec.directory, spec.directory.parent) if (folder / "tokenizer.json").is_file()]
    if not folders:
        return None
    try:
        write_tokenizer(folders[0], scratch, trust_remote_code=spec.trust_remote_code)
    except Exception:
        # A library is not installed, or the tokenizer cannot be converted.
        return None
    return scratch


def _empty(scratch: Path) -> Path:
    folder = scratch / "none"
    folder.mkdir(exist_ok=True)
    return folder
