"""A tiny Llama with random weights as an OpenVINO export."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers

from conch.backends.generation.engine import EngineSpec, GenerationEngine
from conch.backends.generation.generation_backend import open_engine

VOCABULARY: Final = 160
EOS: Final = 2
SIZES: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
}


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(3, VOCABULARY) for _ in range(source.randrange(1, 90))] for _ in range(count)]


def llama(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()


def greedy(module: Any, prompt: list[int], tokens: int) -> list[int]:
    """What transformers.generate continues a prompt with."""
    with torch.no_grad():
        ids = module.generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return list(ids[0, len(prompt) :].tolist())


def spec(directory: Path, **changes: Any) -> EngineSpec:
    wanted = {"config": SIZES, "eos_ids": (EOS,), "dtype": "float32", "threads": 1, "cache_tokens": 2048}
    return EngineSpec(directory, **{**wanted, **changes})


def opened(directory: Path, **changes: Any) -> GenerationEngine:
    return open_engine("openvino", spec(directory, **changes))


class _Cache:
    """A past that is given, and what it becomes; as transformers' classes, without what cannot be traced."""

    is_compileable = False

    def __init__(self, past: tuple[Any, ...]) -> None:
        self.past = list(zip(past[::2], past[1::2], strict=True))

    def update(self, key: Any, value: Any, layer: int, *_: Any, **__: Any) -> Any:
        self.past[layer] = tuple(torch.cat(pair, 2) for pair in zip(self.past[layer], (key, value), strict=True))
        return self.past[layer]

    def get_seq_length(self, layer: int = 0) -> Any:
        return self.past[layer][0].shape[2]


class _Flat(torch.nn.Module):
    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, *past: Any) -> tuple[Any, ...]:
        cache = _Cache(past)
        new, total = input_ids.shape[1], attention_mask.shape[1]
        rows = torch.arange(new)[:, None] + (total - new)
        seen = (torch.arange(total)[None] <= rows)[None, None] & (attention_mask[:, None, None] > 0)
        bias = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
        found = self.module(
            input_ids=input_ids, attention_mask=bias, position_ids=position_ids, past_key_values=cache, use_cache=True
        )
        return (found.logits, *(tensor for pair in cache.past for tensor in pair))


def export(module: Any, directory: Path) -> None:
    """Write openvino_model.xml: stateful, with ``beam_idx``, as OpenVINO GenAI takes it."""
    import openvino
    from openvino import opset13 as ops
    from openvino.passes import MakeStateful, Manager

    config = module.config
    heads, size = config.num_key_value_heads, config.head_dim
    names = [f".{layer}.{kind}" for layer in range(config.num_hidden_layers) for kind in ("key", "value")]
    past = [torch.zeros(1, heads, 3, size) for _ in names]
    ids = torch.ones(1, 2, dtype=torch.long)
    with torch.no_grad():
        model = openvino.convert_model(
            _Flat(module), example_input=(ids, torch.ones(1, 5, dtype=torch.long), torch.tensor([[3, 4]]), *past)
        )
    inputs = ["input_ids", "attention_mask", "position_ids", *(f"past{name}" for name in names)]
    for port, name in zip(model.inputs, inputs, strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_friendly_name(name)
        port.get_node().set_partial_shape(openvino.PartialShape([-1, heads, -1, size] if "past" in name else [-1, -1]))
    for port, name in zip(model.outputs, ["logits", *(f"present{name}" for name in names)], strict=True):
        port.get_tensor().set_names({name})
    model.validate_nodes_and_infer_types()
    beams = ops.parameter([-1], openvino.Type.i32, name="beam_idx")
    beams.output(0).get_tensor().add_names({"beam_idx"})
    model.add_parameters([beams])
    zero = ops.constant(np.int64(0))
    for port in model.inputs[3:-1]:
        readers = list(port.get_target_inputs())
        reordered = ops.gather(port, beams, zero)
        for reader in readers:
            reader.replace_source_output(reordered.output(0))
    passes = Manager()
    states = [(model.input(f"past{name}").get_node(), model.output(f"present{name}").get_node()) for name in names]
    passes.register_pass(MakeStateful(states))
    passes.run_passes(model)
    rows = ops.gather(ops.shape_of(model.input("input_ids")), ops.constant(np.array([0], np.int64)), zero)
    shape = ops.concat([rows, ops.constant(np.array([heads, 0, size], np.int64))], 0)
    for node in model.get_ops():
        if node.get_type_name() == "ReadValue":
            node.set_arguments([ops.broadcast(ops.constant(np.float32(0)), shape)])
    model.validate_nodes_and_infer_types()
    directory.mkdir(parents=True, exist_ok=True)
    openvino.save_model(model, directory / "openvino_model.xml", compress_to_fp16=False)
