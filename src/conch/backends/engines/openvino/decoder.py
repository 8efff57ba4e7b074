"""A decoder over OpenVINO's paged attention: an export or a GGUF file with a paged KV cache, on the CPU.

OpenVINO's transformation replaces the attention of a stateful graph by an operator that reads and writes the KV cache
in blocks. The operator runs any number of sequences in one inference, each at its own position; inputs contain the
start of the tokens and the blocks of each sequence. Runs in workers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import openvino
from openvino import opset13 as ops
from openvino._offline_transformations import paged_attention_transformation

from conch.backends.batching.decoder import Chunk, Decoder, Logits
from conch.backends.engines.openvino.gguf_weights import gguf_graph
from conch.backends.engines.openvino.lora import adapter_inputs, add_branches
from conch.backends.generation.engine import EngineSpec
from conch.backends.generation.lora import LoraWeights
from conch.backends.graphs.openvino import reason
from conch.core.errors import invalid
from conch.machine.facts import usable_cores
from conch.machine.memory import free_memory

#: Tokens per block of the KV cache; fixed in OpenVINO's CPU plug-in.
BLOCK: Final = 32
#: The default cache holds this many tokens per sequence, limited to 1 / ``PART_OF_MEMORY`` of the free memory.
TOKENS_EACH: Final = 4096
PART_OF_MEMORY: Final = 8
_QUANTISED: Final = re.compile(rb'element_type="[iu][48]"')
#: The default number of sequences in the batch and of tokens in a step.
SEQUENCES: Final = 48
BATCHED: Final = 256
#: The input with the numbers of the tokens whose logits are computed.
WANTED: Final = "wanted_tokens"
#: The inputs that ``run`` sets; a graph may lack ``position_ids``.
_INPUTS: Final = (
    *("input_ids", "position_ids", "past_lens", "subsequence_begins", "block_indices", "block_indices_begins"),
    *("max_context_len", WANTED),
)
#: Operators between the last matrix multiplication of a network and its logits, such as a bias, a scale or a soft cap.
_ELEMENTWISE: Final = frozenset({"Add", "Subtract", "Multiply", "Divide", "Tanh", "Convert"})
#: The alignment of the cache (bytes), for aligned loads of vectors.
_ALIGNMENT: Final = 64


@dataclass(frozen=True, slots=True)
class Precision:
    """Number formats with OpenVINO's names; ``exact`` disables quantised activations."""

    arithmetic: str
    cache: str
    exact: bool = False

    @classmethod
    def of(cls, spec: EngineSpec, capabilities: tuple[str, ...]) -> Precision:
        """Choose the formats for ``spec.dtype`` on a CPU with these ``capabilities`` (OpenVINO's names).

        With ``auto``, quantised weights are multiplied in int8, which decodes small batches 1.5 times as fast as bf16,
        even with AMX, and agrees with float32 about as often. Other weights use bf16 if the CPU supports it. The cache
        has 16 bits per number, with which greedy tokens equalled those of float32; with OpenVINO's default of 8 bits
        they did not. Raises INVALID_ARG for an unsupported dtype.
        """
        if spec.dtype == "float32":
            return cls("f32", "f32", exact=True)
        if spec.dtype == "bfloat16":
            if "BF16" not in capabilities:
                raise invalid("dtype 'bfloat16' is not supported by this CPU")
            return cls("bf16", "bf16")
        if spec.dtype != "auto":
            raise invalid(f"dtype '{spec.dtype}': engine 'openvino' computes in float32 or bfloat16")
        if "BF16" in capabilities and not quantised(spec):
            return cls("bf16", "bf16")
        return cls("f32", "f16")

    def properties(self, threads: int) -> dict[str, Any]:
        """Return OpenVINO's properties for compiling a model; 0 ``threads`` means all usable cores."""
        chosen = {
            "INFERENCE_PRECISION_HINT": self.arithmetic,
            "KV_CACHE_PRECISION": self.cache,
            "INFERENCE_NUM_THREADS": threads or usable_cores(),
            # Pinned threads of two models, or of a model and the server, would compete for the same cores.
            "ENABLE_CPU_PINNING": False,
        }
        return {**chosen, "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0} if self.exact else chosen


def quantised(spec: EngineSpec) -> bool:
    """Whether the weights have fewer than 16 bits per number."""
    if spec.gguf is not None:
        return spec.gguf.quantised
    return _QUANTISED.search((spec.directory / "openvino_model.xml").read_bytes()) is not None


def cache_blocks(spec: EngineSpec, token_bytes: int, sequences: int, context: int) -> int:
    """Return the number of blocks in the KV cache, for tokens of ``token_bytes``.

    ``context`` is the length limit of a sequence (tokens).
    """
    if spec.cache_tokens:
        return max(1, spec.cache_tokens // BLOCK)
    sequence_tokens = min(context, TOKENS_EACH)
    free = free_memory().available
    fitting = free // PART_OF_MEMORY // token_bytes
    return -(-max(sequence_tokens, min(sequences * sequence_tokens, fitting)) // BLOCK)


def capabilities() -> tuple[str, ...]:
    """Return OpenVINO's names of the number formats that the CPU supports."""
    import openvino

    core: Any = openvino.Core()
    return tuple(map(str, core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")))


class OpenVinoDecoder(Decoder):
    """One compiled graph and its KV cache.

    Each adapter has a separate inference request, with its matrices as inputs; all requests share the weights and
    the cache.
    """

    block_tokens = BLOCK
    loads_adapters = True

    def __init__(self, spec: EngineSpec) -> None:
        precision = Precision.of(spec, capabilities())
        adapters = {name: LoraWeights.read(path) for name, path in spec.adapters.items()}
        self.precision = f"{precision.arithmetic} (KV cache {precision.cache})"
        self.adapters = tuple(adapters)
        compiled = _compiled(spec, precision, adapters)
        ports = {port.get_any_name(): port for port in compiled.inputs}
        caches = {name: port for name, port in ports.items() if "_cache." in name}
        sizes = {name: _block_bytes(spec, name, port) for name, port in caches.items()}
        [logits] = compiled.outputs
        self.vocabulary = logits.get_partial_shape()[-1].get_length()
        self.token_bytes = sum(sizes.values()) // BLOCK
        context = spec.context or int(spec.config.get("max_position_embeddings") or TOKENS_EACH)
        self.blocks = self.slots = cache_blocks(spec, self.token_bytes, spec.max_sequences or SEQUENCES, context)
        self.context = min(context, self.blocks * BLOCK)
        self.batched_tokens = max(spec.max_batched_tokens or BATCHED, spec.max_sequences or SEQUENCES)
        #: The cache of each layer's keys and values as bytes ``[blocks, bytes per block]``.
        self._caches = [_zeros(self.blocks, size) for size in sizes.values()]
        tensors = {
            name: openvino.Tensor(cache, [self.blocks, *_dims(port)], port.get_element_type())
            for (name, port), cache in zip(caches.items(), self._caches, strict=True)
        }
        self._compiled, self._ports, self._cache_tensors = compiled, ports, tensors
        self._requests: dict[str, _InferRequest] = {}
        for name, adapter in {"": LoraWeights(), **adapters}.items():
            self.attach_adapter(name, adapter)

    def attach_adapter(self, key: str, adapter: LoraWeights) -> None:
        tensors = {**self._cache_tensors, **adapter_inputs(adapter, self._ports)}
        self._requests[key] = _InferRequest(self._compiled.create_infer_request(), self._ports, tensors)

    def detach_adapter(self, key: str) -> None:
        del self._requests[key]

    def run(self, chunks: Sequence[Chunk], adapter: str = "") -> Logits:
        tokens: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        blocks: list[int] = []
        token_begins, block_begins, longest = [0], [0], 0
        for chunk in chunks:
            tokens += chunk.tokens
            blocks += chunk.blocks
            end, tokens_end = chunk.start + len(chunk.tokens), len(tokens)
            positions += range(chunk.start, end)
            wanted += range(tokens_end - chunk.wanted, tokens_end)
            token_begins.append(tokens_end)
            block_begins.append(len(blocks))
            longest = max(longest, end)
        request = self._requests[adapter]
        request.set("input_ids", tokens)
        request.set("position_ids", positions)
        request.set("past_lens", [chunk.start for chunk in chunks])
        request.set("subsequence_begins", token_begins)
        request.set("block_indices", blocks)
        request.set("block_indices_begins", block_begins)
        request.set("max_context_len", [longest])
        request.set(WANTED, wanted)
        logits: Logits = request.infer().reshape(-1, self.vocabulary)
        return logits

    def share(self, source: int, target: int, tokens: int, copied: tuple[int, int] | None) -> None:
        if copied is not None:
            before, after = copied
            for cache in self._caches:
                cache[after] = cache[before]

    def truncate(self, slot: int, tokens: int) -> None:
        # The blocks belong to the caller, who tells each run what they hold.
        pass

    def close(self) -> None:
        self._requests.clear()
        self._cache_tensors.clear()
        self._caches.clear()


class _InferRequest:
    """An inference request with fixed ``tensors`` and variable inputs of one dimension, or none.

    A tensor points to the memory of its array and does not keep it alive. An array is reused if the next inference has
    as many values.
    """

    def __init__(self, request: Any, ports: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
        self._request = request
        self._ports = {name: port for name, port in ports.items() if name not in tensors}
        self._arrays = {name: self._allocate(name, 1) for name in self._ports}
        self._tensors = tensors
        for name, tensor in tensors.items():
            request.set_tensor(ports[name], tensor)

    def set(self, name: str, values: Sequence[int]) -> None:
        """Set an input; no effect if the graph has no such input."""
        array = self._arrays.get(name)
        if array is None:
            return
        if len(array) != len(values):
            array = self._arrays[name] = self._allocate(name, len(values))
        array[:] = values

    def infer(self) -> Any:
        self._request.infer(share_outputs=True)
        # Faster than an index into the result, which is looked up by its type.
        return self._request.get_output_tensor(0).data

    def _allocate(self, name: str, size: int) -> Any:
        """Return a new array ``[size]`` in which the request will read the input."""
        port = self._ports[name]
        array = np.empty(size, port.get_element_type().to_dtype())
        shaped = array.reshape([size] * port.get_partial_shape().rank.get_length())
        self._request.set_tensor(port, openvino.Tensor(shaped, shared_memory=True))
        return array


def _compiled(spec: EngineSpec, precision: Precision, adapters: dict[str, LoraWeights]) -> Any:
    """Compile the graph of a model for a paged cache. Raises INVALID_ARG for a graph that has none."""
    core: Any = openvino.Core()
    try:
        model = core.read_model(spec.directory / "openvino_model.xml") if spec.gguf is None else gguf_graph(spec.gguf)
        paged_attention_transformation(model)
        _select_tokens(model)
        add_branches(model, adapters, everywhere=bool(spec.adapter_folders))
        _check_inputs(spec, model)
        return core.compile_model(model, "CPU", precision.properties(spec.threads))
    except RuntimeError as error:
        raise invalid(f"engine 'openvino' cannot load {spec.source}: {reason(error)}") from None


def _check_inputs(spec: EngineSpec, model: Any) -> None:
    """Raise INVALID_ARG for inputs that ``run`` does not set, and for state, which all sequences would share."""
    if states := [node for node in model.get_ops() if node.get_type_name() == "ReadValue"]:
        raise invalid(
            f"engine 'openvino' cannot load {spec.source}: its graph keeps state other than the KV cache of attention, "
            f"'{states[0].get_attributes()['variable_id']}'; set parameter 'engine' to 'transformers'"
        )
    for port in model.inputs:
        name, rank = port.get_any_name(), port.get_partial_shape().rank.get_length()
        expected = name in _INPUTS or name.startswith(("key_cache.", "value_cache.", "lora."))
        if not expected or (name in _INPUTS and rank > 1):
            raise invalid(
                f"engine 'openvino' cannot load {spec.source}: its graph has an input '{name}' of {rank} dimensions"
            )


def _select_tokens(model: Any) -> None:
    """Compute logits only for the tokens whose numbers are in the new input ``wanted_tokens``.

    Selects the rows before the last matrix multiplication, or those of the logits if it is not recognised.
    """
    wanted = ops.parameter([-1], np.int64, name=WANTED)
    wanted.output(0).get_tensor().set_names({WANTED})
    reader = model.output("logits").get_node().input(0)
    multiplication = _last_multiplication(reader.get_source_output().get_node())
    if multiplication is not None:
        reader = multiplication.input(0)
    selected = ops.gather(reader.get_source_output(), wanted, ops.constant(np.int64(0)))
    reader.replace_source_output(selected.output(0))
    model.add_parameters([wanted])
    model.validate_nodes_and_infer_types()


def _last_multiplication(node: Any) -> Any:
    """Return the matrix multiplication before ``node``, which has one row per token, or None."""
    while node.get_type_name() in _ELEMENTWISE:
        sources = [source for source in (value.get_node() for value in node.input_values()) if not _constant(source)]
        if len(sources) != 1:
            return None
        [node] = sources
    if node.get_type_name() != "MatMul" or node.get_attributes()["transpose_a"]:
        return None
    rows = node.input_value(0).get_partial_shape()
    return node if rows.rank.get_length() == 3 and rows[0].is_dynamic else None


def _constant(node: Any) -> bool:
    while node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    return bool(node.get_type_name() == "Constant")


def _block_bytes(spec: EngineSpec, name: str, port: Any) -> int:
    """Return the size of a block in a cache with the shape ``[blocks, heads, tokens, width]``."""
    if any(dim.is_dynamic for dim in list(port.get_partial_shape())[1:]):
        raise invalid(f"engine 'openvino' cannot load {spec.source}: the size of '{name}' is not known")
    bits: int = port.get_element_type().bitwidth
    return math.prod(_dims(port)) * bits // 8


def _dims(port: Any) -> list[int]:
    return [dim.get_length() for dim in list(port.get_partial_shape())[1:]]


def _zeros(blocks: int, block_bytes: int) -> npt.NDArray[np.uint8]:
    """Return aligned zeros; the system provides their memory when it is first used."""
    memory = np.zeros(blocks * block_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + blocks * block_bytes].reshape(blocks, block_bytes)
