"""Loads a causal language model in torch, and exports it to OpenVINO's IR with its KV cache as state of the graph.

The graph has the form that OpenVINO's generation pipelines convert to a paged cache: inputs ``input_ids``,
``attention_mask``, ``position_ids`` (INT64 ``[rows, tokens]``) and ``beam_idx`` (INT32 ``[rows]``: the cache row that
each row continues), output ``logits``, attention as one operator.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array
from conch.checkpoints.folder import Checkpoint
from conch.convert.libraries import describe_error, load_pretrained, silence_libraries
from conch.core.errors import ConchError, internal, unsupported

#: Rotary embeddings with angles that depend on the length of the text, which a trace cannot represent.
_LENGTH_DEPENDENT: Final = ("dynamic", "longrope")


def not_convertible(why: str) -> ConchError:
    """Return an UNSUPPORTED error with the reason why a model cannot be converted, and an alternative."""
    return unsupported(f"{why}: serve the checkpoint directly (engine transformers)")


def load(checkpoint: Checkpoint) -> CausalNetwork:
    """Load the network of a checkpoint.

    Raises INVALID_ARG if it cannot be loaded, UNSUPPORTED if it cannot be exported.
    """
    if checkpoint.gguf is not None:
        raise not_convertible("the weights of a GGUF file are already quantised")
    try:
        module = load_pretrained(checkpoint, "AutoModelForCausalLM", attention="sdpa", outputs=("logits",))
    except ConchError as error:
        if "scaled_dot_product_attention" not in str(error.__cause__):
            raise
        kind = checkpoint.config.get("model_type", "")
        why = f"the attention of a '{kind}' is not of the form that OpenVINO's KV cache needs"
        raise not_convertible(why) from None
    problem = paged_cache_problem(module.config.get_text_config())
    if problem:
        raise not_convertible(problem)
    network = CausalNetwork(module, checkpoint.options.threads)
    network.require_plain_cache()
    return network


def paged_cache_problem(config: Any) -> str:
    """Return why the paged KV cache would change the predictions of such a network; empty if it would not.

    The exported graph supports all features checked here, but a pipeline with a paged cache drops them silently.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    others = kinds - {"sliding_attention", "full_attention"}
    if others:
        return f"it has layers of kind {', '.join(sorted(others))}, which OpenVINO's KV cache does not hold"
    if getattr(config, "alibi", False):
        return "it encodes positions with ALiBi, which OpenVINO's KV cache weights differently"
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "")) if isinstance(rope, dict) else ""
    if kind in _LENGTH_DEPENDENT:
        return f"its positions ('{kind}') depend on how long a text is, which an exported graph cannot express"
    return ""


class CausalNetwork:
    """A module of transformers with a KV cache; ids are INT64."""

    def __init__(self, module: Any, threads: int = 0) -> None:
        from conch.backends.engines.transformers.network import cache_argument

        self.module = module
        self._cache_argument = cache_argument(module)
        if threads:
            import torch

            torch.set_num_threads(threads)

    @property
    def vocabulary(self) -> int:
        size: int = self.module.config.get_text_config().vocab_size
        return size

    def new_cache(self) -> Any:
        """Return an empty KV cache."""
        from transformers import DynamicCache

        return DynamicCache(config=self.module.config)

    def run(self, cache: Any, **inputs: Any) -> Any:
        """Run transformers on ``inputs`` after the tokens in ``cache``, to which it adds those of ``inputs``."""
        return self.module(use_cache=True, **{self._cache_argument: cache}, **inputs)

    def cache_shapes(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Return heads and width of the keys and of the values of each layer, determined by running the network."""
        import torch

        cache = self.new_cache()
        with torch.inference_mode(), silence_libraries():
            self.run(cache, input_ids=torch.ones((1, 2), dtype=torch.int64))
        shapes = [(layer.keys.shape, layer.values.shape) for layer in cache.layers]
        return [((keys[1], keys[3]), (values[1], values[3])) for keys, values in shapes]

    def require_plain_cache(self) -> None:
        """Raise UNSUPPORTED for a network whose cache is not a key and a value per token."""
        try:
            shapes = self.cache_shapes()
        except Exception:  # usually an AttributeError: no keys or no layers
            shapes = []
        if not shapes:
            raise not_convertible(
                f"a '{self.module.config.model_type}' caches more than the keys and values of its tokens"
            )

    def logits(self, ids: Array, starts: Sequence[int] = ()) -> Array:
        """Return FP32 ``[rows, tokens, vocabulary]`` for INT64 ids ``[rows, tokens]``.

        The ids are split at ``starts``, and the parts run one after another with the cache.
        """
        import torch

        cache, logits = self.new_cache(), []
        with torch.inference_mode(), silence_libraries():
            for part in np.split(ids, list(starts), axis=1):
                outputs = self.run(cache, input_ids=torch.from_numpy(part.copy()))
                logits.append(outputs.logits.float().numpy())
        return np.concatenate(logits, axis=1)

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Return the most likely next ``count`` tokens of each prompt, batched by length.

        No token ends a continuation.
        """
        continuations: dict[int, list[int]] = {}
        for length in {len(prompt) for prompt in prompts}:
            indices = [index for index, prompt in enumerate(prompts) if len(prompt) == length]
            batch = [list(prompts[index]) for index in indices]
            continuations |= zip(indices, self._continue(batch, count), strict=True)
        return [continuations[index] for index in range(len(prompts))]

    def prefill(self, prompt: Sequence[int]) -> float:
        """Return the time from a prompt to its first token (s)."""
        seconds: list[float] = []
        self._continue([list(prompt)], 1, seconds)
        return seconds[0]

    def decode(self, prompts: Sequence[Sequence[int]], count: int) -> list[float]:
        """Return the time of each of ``count`` decoding steps (s) for prompts of equal length in one batch."""
        seconds: list[float] = []
        self._continue([list(prompt) for prompt in prompts], count + 1, seconds)
        return seconds[1:]

    def _continue(self, prompts: list[list[int]], count: int, seconds: list[float] | None = None) -> list[list[int]]:
        """Return the most likely next ``count`` tokens of prompts of equal length.

        Appends the time of each token (s) to ``seconds``.
        """
        import torch

        cache, tokens = self.new_cache(), []
        with torch.inference_mode(), silence_libraries():
            ids = torch.tensor(prompts)
            for _ in range(count):
                before = time.perf_counter()
                outputs = self.run(cache, input_ids=ids, logits_to_keep=1)
                ids = outputs.logits[:, -1].argmax(-1, keepdim=True)
                tokens.append(ids)
                if seconds is not None:
                    seconds.append(time.perf_counter() - before)
        rows: list[list[int]] = torch.cat(tokens, dim=1).tolist()
        return rows


# Paging replaces a graph's masks by causal masks. A window ("the last 4,096 tokens") is kept only if the mask is
# added, and is silently lost if it is Boolean.


#: Added to masked positions: the lowest number of fp16, which every precision can represent.
MASKED: Final = -65504.0
#: The index of the window among the inputs of OpenVINO's paged attention; a window of 0 means none.
_WINDOW_INPUT: Final = 10


@contextmanager
def additive_masks() -> Iterator[None]:
    """Make transformers create additive masks in a context, for networks with the attention ``sdpa``."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as FUNCTIONS

    # An entry of this instance overrides that of the class, which is unchanged.
    FUNCTIONS["sdpa"] = _additive
    try:
        yield
    finally:
        del FUNCTIONS["sdpa"]


def _additive(
    *,
    batch_size: Any,
    q_length: Any,
    kv_length: Any,
    mask_function: Callable[..., Any],
    q_offset: Any = 0,
    kv_offset: Any = 0,
    attention_mask: Any = None,
    **_: Any,
) -> Any:
    """Return FP32 ``[rows, 1, queries, keys]`` of 0 or :data:`MASKED`; sizes are tensors while a network is traced."""
    import torch
    from transformers import masking_utils

    # Some versions of transformers pass the positions instead of the length.
    queries = q_length if getattr(q_length, "ndim", 0) else torch.arange(q_offset, q_offset + q_length)
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        mask_function = masking_utils.and_masks(mask_function, masking_utils.padding_mask_function(padding))
    rows, keys = torch.arange(batch_size), torch.arange(kv_length) + kv_offset
    allowed = mask_function(
        rows[:, None, None, None], torch.arange(1)[None, :, None, None], queries[:, None], keys[None, :]
    )
    allowed = allowed.expand(batch_size, -1, queries.shape[0], kv_length)
    return torch.where(allowed, torch.tensor(0.0), torch.tensor(MASKED))


def windows_of(config: Any) -> list[int]:
    """Return the sliding window of each layer (tokens); 0 for a layer without one."""
    window = getattr(config, "sliding_window", None) or 0
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return [window if getattr(config, "use_sliding_window", True) else 0] * layers
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def verify_windows(model: Any, config: Any) -> None:
    """Raise INTERNAL if paging ``model`` (an ``openvino.Model``, not modified) would lose a layer's window."""
    from openvino._offline_transformations import paged_attention_transformation
    from openvino.passes import ConstantFolding, Manager

    expected = Counter(windows_of(config))
    paged = model.clone()
    paged_attention_transformation(paged)
    passes = Manager()
    passes.register_pass(ConstantFolding())
    passes.run_passes(paged)
    nodes: Any = paged.get_ops()
    windows = Counter(
        int(node.input_value(_WINDOW_INPUT).get_node().data)
        for node in nodes
        if node.get_type_name() == "PagedAttentionExtension"
    )
    if windows != expected:
        raise internal(f"OpenVINO's KV cache has windows {_layers(windows)} instead of {_layers(expected)}")


def _layers(windows: Counter[int]) -> str:
    return ", ".join(f"{window} ({count} layers)" for window, count in sorted(windows.items()))


TEXT_INPUTS: Final = ("input_ids", "attention_mask", "position_ids")
#: Rows, past tokens and new tokens of the trace; none is 1, so that tracing omits no operation.
TRACED: Final = (2, 5, 3)
#: The maximum difference of logits from torch's, relative to the largest.
TOLERANCE: Final = 2e-3
_UNKNOWN: Final = re.compile(r"No conversion rule found for operations: (.*)")


def export(network: CausalNetwork) -> Any:
    """Return the stateful ``openvino.Model`` in fp32, verified against torch.

    Raises UNSUPPORTED if the export fails.
    """
    shapes = [shape for layer in network.cache_shapes() for shape in layer]
    try:
        with silence_libraries():
            model = _traced(network, shapes)
            _name(model, shapes)
            select_rows(model)
            make_stateful(model)
            verify(model, network)
            verify_windows(model, network.module.config.get_text_config())
    except Exception as error:  # an error of torch's tracing or OpenVINO's frontend, or a mismatch
        unknown = _UNKNOWN.search(str(error))
        why = f"OpenVINO has no operator for {unknown[1].strip()}" if unknown else describe_error(error)
        raise not_convertible(f"the export to OpenVINO failed ({why})") from None
    return model


def _traced(network: CausalNetwork, shapes: Sequence[tuple[int, int]]) -> Any:
    """Return the graph of one run with a past, which is among its inputs and outputs."""
    import torch

    rows, past, new = TRACED
    ids = torch.randint(0, network.vocabulary, (rows, new), generator=torch.Generator().manual_seed(7))
    mask = torch.ones((rows, past + new), dtype=torch.int64)
    positions = torch.arange(past, past + new).repeat(rows, 1)
    cache = [torch.zeros((rows, heads, past, width)) for heads, width in shapes]
    return traced(_flat(network), (ids, mask, positions, *cache))


def traced(module: Any, example: Sequence[Any]) -> Any:
    """Return the graph of a module of torch, from a run with the tensors ``example``.

    Calls the frontend directly, because ``openvino.convert_model`` sends usage telemetry.
    """
    import torch
    from openvino._offline_transformations import apply_moc_transformations
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

    with torch.no_grad(), additive_masks():
        decoder = TorchScriptPythonDecoder(module, example_input=tuple(example))
        frontend: Any = FrontEndManager().load_by_framework("pytorch")
        model: Any = frontend.convert(frontend.load(decoder))
    # OpenVINO can page only graphs in the form that this transformation creates.
    apply_moc_transformations(model, cf=False, smart_reshape=True)
    return model


def cache_of(tensors: Sequence[Any]) -> Any:
    """Return transformers' cache with an initial past: the keys and values of each layer in turn."""
    from transformers.cache_utils import Cache, DynamicLayer

    class Layer(DynamicLayer):
        """A layer's cache with an initial past."""

        def __init__(self, keys: Any, values: Any) -> None:
            super().__init__()
            self.keys, self.values = keys, values
            self.dtype, self.device = keys.dtype, keys.device
            self.is_initialized = True

    return Cache(layers=[Layer(*tensors[index : index + 2]) for index in range(0, len(tensors), 2)])


def _flat(network: CausalNetwork) -> Any:
    """Return the network with keys and values as positional tensors."""
    import torch

    class Flat(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network.module

        def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, *past: Any) -> tuple[Any, ...]:
            cache = cache_of(past)
            outputs = network.run(
                cache,
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                return_dict=True,
            )
            return (outputs.logits, *(tensor for layer in cache.layers for tensor in (layer.keys, layer.values)))

    return Flat().eval()


def cache_names(count: int, prefix: str) -> list[str]:
    """Return the names of ``count`` tensors with the keys and values of each layer: ``prefix.0.key`` …"""
    return [f"{prefix}.{index // 2}.{('key', 'value')[index % 2]}" for index in range(count)]


def _name(model: Any, shapes: Sequence[tuple[int, int]]) -> None:
    """Name inputs and outputs, and make the batch and text sizes dynamic."""
    inputs: dict[str, Sequence[int]] = dict.fromkeys(TEXT_INPUTS, (-1, -1))
    past = [(-1, heads, -1, width) for heads, width in shapes]
    inputs |= zip(cache_names(len(shapes), "past_key_values"), past, strict=True)
    name_ports(model, inputs, ["logits", *cache_names(len(shapes), "present")])


def name_ports(model: Any, inputs: Mapping[str, Sequence[int]], outputs: Sequence[str]) -> None:
    """Give inputs names and shapes (-1: any size), and outputs names. Raises INTERNAL if the trace lost an input."""
    import openvino

    if len(model.inputs) != len(inputs):
        raise internal(f"the traced graph has {len(model.inputs)} inputs instead of {len(inputs)}: it ignores some")
    for port, (name, shape) in zip(model.inputs, inputs.items(), strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_friendly_name(name)
        port.get_node().set_partial_shape(openvino.PartialShape(list(shape)))
    for port, name in zip(model.outputs, outputs, strict=True):
        port.get_tensor().set_names({name})
    model.validate_nodes_and_infer_types()


def select_rows(model: Any) -> None:
    """Select the rows of the past by ``beam_idx``."""
    import openvino
    from openvino import opset13

    past = [port for port in model.inputs if port.get_any_name().startswith("past_key_values.")]
    beams = opset13.parameter(openvino.PartialShape([-1]), openvino.Type.i32, name="beam_idx")
    beams.output(0).get_tensor().set_names({"beam_idx"})
    model.add_parameters([beams])
    for port in past:
        readers = list(port.get_target_inputs())
        chosen = opset13.gather(port.get_node(), beams, opset13.constant(np.int64(0)))
        for reader in readers:
            reader.replace_source_output(chosen.output(0))
    model.validate_nodes_and_infer_types()


def make_stateful(model: Any) -> None:
    """Store each past in the graph's state, initially empty."""
    from openvino import opset13
    from openvino._offline_transformations import apply_make_stateful_transformation

    count = sum(port.get_any_name().startswith("past_key_values.") for port in model.inputs)
    before, after = cache_names(count, "past_key_values"), cache_names(count, "present")
    apply_make_stateful_transformation(model, dict(zip(before, after, strict=True)))
    rows = opset13.gather(
        opset13.shape_of(model.input("input_ids"), output_type="i64"),
        opset13.constant(np.array([0], np.int64)),
        opset13.constant(np.int64(0)),
    )
    for node in model.get_ops():
        if node.get_type_name() == "ReadValue":
            _, heads, _, width = node.get_output_partial_shape(0)
            sizes = (heads.get_length(), 0, width.get_length())
            shape = opset13.concat([rows, *(opset13.constant(np.array([size], np.int64)) for size in sizes)], 0)
            node.set_arguments([opset13.broadcast(opset13.constant(np.float32(0)), shape)])
    model.validate_nodes_and_infer_types()


def verify(model: Any, network: CausalNetwork) -> None:
    """Compare with torch while the cache grows by many, one and several tokens, with its rows reordered."""
    ids = np.random.default_rng(7).integers(0, network.vocabulary, (3, 12))
    starts = (8, 9)
    expected = network.logits(ids, starts)
    graph, other = StatefulGraph(model), np.array((1, 2, 0))
    first, *parts = np.split(ids, starts, axis=1)
    outputs = [graph.run(first[other])[np.argsort(other)]]
    outputs += [graph.run(part, None if index else np.argsort(other)) for index, part in enumerate(parts)]
    difference = float(np.abs(np.concatenate(outputs, axis=1) - expected).max())
    if not difference <= TOLERANCE * max(1.0, float(np.abs(expected).max())):
        raise internal(f"logits differ from torch's by {difference:.2g}")


class StatefulGraph:
    """An exported graph with its own cache, in fp32, for its logits; the server's pipeline returns only tokens."""

    def __init__(self, model: Any, threads: int = 0) -> None:
        """Compile ``model``, a file or a model."""
        import openvino

        settings = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        if threads:
            settings["INFERENCE_NUM_THREADS"] = str(threads)
        core: Any = openvino.Core()
        self.request: Any = core.compile_model(model, "CPU", settings).create_infer_request()
        self.done = 0

    def reset(self) -> None:
        """Empty the cache."""
        self.request.reset_state()
        self.done = 0

    def run(self, ids: Array, beams: Array | None = None) -> Array:
        """Return FP32 ``[rows, tokens, vocabulary]`` for tokens that follow those of earlier runs.

        ``beams`` selects the cache row that each row continues; the default is its own.
        """
        rows, tokens = ids.shape
        end = self.done + tokens
        outputs = self.request.infer({
            "input_ids": ids,
            "attention_mask": np.ones((rows, end), np.int64),
            "position_ids": np.tile(np.arange(self.done, end), (rows, 1)),
            "beam_idx": np.arange(rows, dtype=np.int32) if beams is None else beams.astype(np.int32),
        })  # fmt: skip
        self.done = end
        logits: Array = np.array(outputs["logits"])
        return logits
