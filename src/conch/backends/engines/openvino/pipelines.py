"""Builds the pipelines of the engine ``openvino`` and their tokenizer, which grammars require. Runs in workers."""

from __future__ import annotations

import json
import logging
import math
import struct
from pathlib import Path
from typing import Any

from conch.backends.engines.openvino.config import reason
from conch.backends.engines.openvino.gguf_weights import write_graph
from conch.backends.engines.openvino.precision import Precision
from conch.backends.engines.openvino.vocabulary import TOKENIZER, misfit, spell
from conch.backends.generation.engine import EngineSpec
from conch.checkpoints.tokenizers.token_bytes import token_bytes
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer
from conch.core.errors import ConchError, invalid
from conch.machine.temporary import TemporaryFolder


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


def capabilities() -> tuple[str, ...]:
    """Return OpenVINO's names of the number formats that the CPU supports."""
    import openvino

    core: Any = openvino.Core()
    return tuple(map(str, core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")))


def pipeline(
    spec: EngineSpec, tokenizer: Any, precision: Precision, blocks: int, batched: int, adapter: Path | None = None
) -> Any:
    """Build a pipeline with ``blocks`` blocks of KV cache and at most ``batched`` tokens per step.

    Raises INVALID_ARG for a model or adapter that cannot be loaded.
    """
    import openvino_genai

    scheduler: Any = openvino_genai.SchedulerConfig()
    scheduler.num_kv_blocks = blocks
    scheduler.max_num_batched_tokens = batched
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = spec.prefix_caching
    properties = precision.properties(spec.threads)
    if adapter is not None:
        properties["adapters"] = lora(adapter, spec.directory / "openvino_model.xml")
    with TemporaryFolder() as scratch:
        folder = spec.directory if spec.gguf is None else write_graph(spec.gguf, tokenizer, scratch)
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
