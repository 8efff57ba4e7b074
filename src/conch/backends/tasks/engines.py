"""The engines that run a task's network, arrays in, arrays out: ``torch``, ``onnxruntime``, ``openvino``, ``llamacpp``.

``open_engine`` selects the engine for a checkpoint. Libraries are imported when an engine is opened.
"""

from __future__ import annotations

import inspect
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import DTYPES, Array, Strings
from conch.backends.base.verification import require_tensors
from conch.backends.generation.engine import EngineSpec
from conch.backends.generation.options import library_arguments
from conch.backends.graphs.graph import Graph
from conch.backends.graphs.onnxruntime import CPU, CUDA, TENSORRT, Session, SessionSettings
from conch.backends.graphs.openvino import CompiledGraph, CompileSettings
from conch.backends.graphs.signature import GraphTensor
from conch.backends.tasks.vocabulary import VocabularyPooling
from conch.checkpoints.files import engines_of
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.gguf_retrieval import answers_yes_or_no
from conch.core.errors import Code, ConchError, internal, invalid, one_line, unsupported
from conch.core.lengths import on_grid
from conch.machine import extras
from conch.machine.facts import openmp_threads, shared_pool_threads, threads_per_instance, usable_cores


class NetworkEngine(ABC):
    """A loaded network. Several threads, one per instance, may call ``run`` concurrently.

    ``inputs`` are its input names (``input_ids``, ``attention_mask``, ``token_type_ids``, ``pixel_values`` …) and
    ``outputs`` its output names (``logits``, ``last_hidden_state``, ``start_logits``, ``end_logits`` …), as in
    transformers. ``precision`` is ``fp32``, ``fp16``, ``bf16`` or ``int8``; ``device`` is ``cpu`` or ``cuda``;
    ``variant`` is the name of a converted variant in ``conch.json``.
    """

    name: str
    device: str = "cpu"
    precision: str
    variant: str = ""
    #: Further facts about the running model, by name.
    facts: Mapping[str, str] = {}
    #: The module whose version is that of the engine, if its name is another.
    library: str = ""
    #: A problem found when the engine was opened, as a sentence; empty if there is none.
    warning: str = ""
    inputs: frozenset[str]
    outputs: tuple[str, ...]

    @property
    def parts(self) -> Sequence[NetworkEngine]:
        """The underlying engines: the engine itself, or the engines that it selects from."""
        return (self,)

    def padded_shape(self, rows: int, length: int) -> tuple[int, int]:
        """Return the shape to which ``[rows, length]`` is padded; larger if new shapes slow the engine down."""
        return rows, length

    def require_outputs(self, names: Collection[str], source: str) -> None:
        """Raise UNSUPPORTED unless the network has all outputs ``names``; ``source`` is the checkpoint."""
        if not set(names) <= set(self.outputs):
            raise unsupported(
                f"'{source}' returns {', '.join(self.outputs)}; the task needs {' and '.join(names)}: export it with "
                "the head of the task, or set parameter 'task' to what it was exported for"
            )

    def require_tensors(self, arrays: Mapping[str, Array]) -> None:
        """Raise INVALID_ARG if the outputs for ``arrays`` depend on weights that the checkpoint lacks.

        Does nothing by default, because an exported graph contains all of its weights.
        """
        return None

    def reference(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return transformers' outputs for ``arrays``, the complete output of a tokenizer or processor.

        Empty for engines that do not run transformers' networks.
        """
        return {}

    @abstractmethod
    def run(self, arrays: Mapping[str, Array], names: Collection[str] = ()) -> dict[str, Array]:
        """Compute FP32 outputs from INT64 arrays of ``[sequences, length]``, or FP32 pixels.

        Arrays that are not in ``inputs`` are ignored. ``names`` are the outputs that the caller reads; others may be
        omitted if the network has all of these.
        """


#: The only input that a task may omit; all tokens then have type 0.
_ZEROS = "token_type_ids"


class GraphEngine(NetworkEngine):
    """Runs ``graph``, which computes in ``precision``, on ``device``.

    Raises UNSUPPORTED for a graph with an input type that has no numpy type.
    """

    def __init__(self, graph: Graph, precision: str, device: str = "cpu") -> None:
        self._graph = graph
        self._dtypes = {tensor.name: _dtype(tensor) for tensor in graph.inputs}
        self.inputs = frozenset(self._dtypes)
        self.outputs = tuple(tensor.name for tensor in graph.outputs)
        self.precision = precision
        self.device = device

    def run(self, arrays: Mapping[str, Array], names: Collection[str] = ()) -> dict[str, Array]:
        tensors = [tensor for tensor in self._graph.outputs if tensor.name in names]
        if not names or len(tensors) < len(names):
            tensors = [*self._graph.outputs]
        # An engine copies each output that is named.
        values = self._graph.infer([tensor.name for tensor in tensors], self._feeds(arrays))
        return {
            tensor.name: _fp32(tensor, value)
            for tensor, value in zip(tensors, values, strict=True)
            if not isinstance(value, Strings)
        }

    def _feeds(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return the graph's inputs from ``arrays``, cast to its types. Raises INTERNAL if an input is missing."""
        feeds = {}
        for name, dtype in self._dtypes.items():
            array = arrays.get(name)
            if array is None:
                if name != _ZEROS or "input_ids" not in arrays:
                    raise internal(
                        f"the graph has the input '{name}', which the task does not provide; "
                        f"it provides {', '.join(arrays)}"
                    )
                array = np.zeros(arrays["input_ids"].shape, dtype)
            feeds[name] = array if array.dtype == dtype else array.astype(dtype)
        return feeds


def _dtype(tensor: GraphTensor) -> np.dtype[np.generic]:
    if tensor.datatype not in DTYPES or tensor.datatype == "BF16":
        raise unsupported(f"the graph's input '{tensor.name}' is {tensor.datatype}, which tasks do not make")
    return DTYPES[tensor.datatype]


def _fp32(tensor: GraphTensor, value: Array) -> Array:
    if tensor.datatype == "BF16":  # the upper half of an FP32
        return (value.astype(np.uint32) << 16).view(np.float32)
    return value if value.dtype == np.float32 else value.astype(np.float32)


class OnnxRuntimeEngine(GraphEngine):
    """A graph for ``instances`` concurrent threads that share ``threads`` cores (0: all usable cores).

    ``device`` is ``cpu`` or ``cuda``. With ``tensorrt``, TensorRT builds the supported parts of the graph on first use,
    in the engine's precision, and CUDA runs the rest. Raises the errors of :class:`Session`.
    """

    name = "onnxruntime"

    def __init__(
        self,
        path: Path,
        *,
        precision: str = "fp32",
        threads: int = 0,
        instances: int = 1,
        device: str = "cpu",
        device_id: int = 0,
        tensorrt: bool = False,
    ) -> None:
        size = shared_pool_threads(threads or usable_cores(), instances)
        providers = [(CPU, {})] if device == "cpu" else _on_gpu(device_id, precision if tensorrt else "")
        super().__init__(Session(path, SessionSettings(threads=size, providers=providers)), precision, device)


def _on_gpu(device_id: int, tensorrt: str) -> Sequence[tuple[str, dict[str, str]]]:
    device = {"device_id": str(device_id)}
    providers = [(CUDA, device), (CPU, {})]
    if tensorrt:
        precision = {f"trt_{tensorrt}_enable": "1"} if tensorrt in ("fp16", "bf16", "int8") else {}
        providers.insert(0, (TENSORRT, {**device, **precision}))
    return providers


#: The number of requests for a shape after which it is not padded, and the maximum number of shapes that are counted.
WORTH_COMPILING: Final = 32
MOST_SHAPES: Final = 512


class OpenVinoEngine(GraphEngine):
    """A graph for ``instances`` concurrent threads that share ``threads`` cores (0: all usable cores).

    ``precision`` is that of the arithmetic (see :class:`CompileSettings`). In OpenVINO, the first run of a new shape
    takes 15 ms, or up to 40 ms with several sequences; later runs take 2 ms. ``padded_shape`` therefore rounds to a
    small set of shapes, except for shapes that are requested often. Raises the errors of :class:`CompiledGraph`.
    """

    name = "openvino"

    def __init__(
        self,
        path: Path,
        *,
        precision: str = "fp32",
        threads: int = 0,
        instances: int = 1,
    ) -> None:
        settings = CompileSettings(threads=threads or usable_cores(), instances=instances, precision=precision)
        super().__init__(CompiledGraph(path, settings), precision)
        self._requested: Counter[tuple[int, int]] = Counter()

    def padded_shape(self, rows: int, length: int) -> tuple[int, int]:
        exact = (rows, length)
        rounded = on_grid(rows, length)
        if exact == rounded or self._requested[exact] >= WORTH_COMPILING:
            return exact
        if len(self._requested) < MOST_SHAPES or exact in self._requested:
            self._requested[exact] += 1
        return rounded


#: The outputs of all layers, and the logits of words pooled over each text, of ``splade``.
HIDDEN_STATES: Final = "hidden_states"
POOLED_LOGITS: Final = "pooled_logits"
#: Outputs of graphs that contain the modules of sentence-transformers: a vector per text, a vector per token, and a
#: weight per token.
POOLED: Final = "sentence_embedding"
TOKEN_VECTORS: Final = "token_vectors"
TOKEN_WEIGHTS: Final = "token_weights"
#: The outputs of each head, with transformers' names.
_OUTPUTS: Final[dict[str, tuple[str, ...]]] = {
    "AutoModel": ("last_hidden_state",),
    "AutoModelForTextEncoding": ("last_hidden_state",),
    "AutoModelForQuestionAnswering": ("start_logits", "end_logits"),
}
#: Precisions of variants by PyTorch dtype, and the reverse.
PRECISIONS: Final = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_DTYPES: Final = {precision: dtype for dtype, precision in PRECISIONS.items()}


class TorchEngine(NetworkEngine):
    """The network of a checkpoint, loaded with transformers' class ``head``, for ``instances`` concurrent threads.

    ``threads`` cores (0: all usable cores) are divided among the threads. ``dtype`` is ``float32``, ``bfloat16``,
    ``float16`` or ``auto`` (FP32 on a CPU, the stored type on a GPU). ``outputs`` are by
    default those of the head. With ``splade``, the strategy and activation of a SpladePooling module, the output is
    ``POOLED_LOGITS``. ``methods`` are those of the network that read texts and images, if its ``forward`` reads only
    both together. Raises UNSUPPORTED if torch or transformers is not installed, INVALID_ARG for a checkpoint that
    cannot be loaded.
    """

    name = "torch"

    def __init__(
        self,
        directory: Path,
        head: str,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        device_id: int = 0,
        threads: int = 0,
        instances: int = 1,
        trust_remote_code: bool = False,
        outputs: Sequence[str] = (),
        splade: tuple[str, bool] | None = None,
        methods: tuple[str, str] | None = None,
    ) -> None:
        extras.require("engine 'torch'", "torch", "transformers")
        import torch
        import transformers

        self._torch = torch
        logging: Any = transformers.utils.logging
        logging.disable_progress_bar()
        self._directory = directory
        if device == "cpu" and dtype == "auto":
            dtype = "float32"
        try:
            network, self._report = getattr(transformers, head).from_pretrained(
                directory,
                dtype=dtype if dtype == "auto" else getattr(self._torch, dtype),
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # require_tensors rejects those that affect outputs, by name
            )
            self.device = device
            self._device = self._torch.device("cpu" if device == "cpu" else f"{device}:{device_id}")
            self._network = network.eval().to(self._device)
        except Exception as error:
            raise invalid(f"'{directory}' cannot be loaded as {head}: {one_line(error)}") from error
        stored = str(self._network.dtype).removeprefix("torch.")
        self.precision = PRECISIONS.get(stored, stored)
        # Networks number positions differently, so each computes its own.
        self.inputs = frozenset(inspect.signature(self._network.forward).parameters) - {"position_ids"}
        self.outputs = tuple(outputs) or _OUTPUTS.get(head, ("logits",))
        self._vocabulary = None
        if splade is not None:
            self._vocabulary = VocabularyPooling(self._network, *splade)
            self.outputs = (POOLED_LOGITS,)
        self._methods = methods or ("forward", "forward")
        self._floats = self._network.dtype
        self._threads = (
            threads_per_instance(threads, instances) if threads else openmp_threads(usable_cores(), instances)
        )
        self._thread = threading.local()

    def require_tensors(self, arrays: Mapping[str, Array]) -> None:
        require_tensors(self._network, self._report, lambda: self.run(arrays), self._directory)

    def reference(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        return self.run(arrays)

    def run(self, arrays: Mapping[str, Array], names: Collection[str] = ()) -> dict[str, Array]:
        self.use_threads()
        with self._torch.inference_mode():
            tensors = {name: self._tensor(arrays[name]) for name in arrays if name in self.inputs}
            if self._vocabulary is not None:
                return {POOLED_LOGITS: self._vocabulary(tensors).float().cpu().numpy()}
            if HIDDEN_STATES in self.outputs:
                tensors["output_hidden_states"] = True
            reads_text, reads_image = self._methods
            method = reads_image if "pixel_values" in tensors else reads_text
            outputs = (self._network if method == "forward" else getattr(self._network, method))(**tensors)
            return {name: self._array(outputs[name]) for name in self.outputs}

    def _array(self, output: Any) -> Array:
        """Return an output as FP32; those of several layers as one array with the layers as the second axis."""
        tensor = self._torch.stack(output, 1) if isinstance(output, tuple) else output
        array: Array = tensor.float().cpu().numpy()
        return array

    def use_threads(self) -> None:
        """Set the number of threads for the calling thread, because OpenMP keeps a pool, and its size, for each."""
        if not hasattr(self._thread, "sized"):
            self._torch.set_num_threads(self._threads)
            self._thread.sized = True

    def _tensor(self, array: Array) -> Any:
        # PyTorch warns about read-only memory, so such arrays are copied; they are small.
        tensor = self._torch.from_numpy(array if array.flags.writeable else np.array(array)).to(self._device)
        return tensor.to(self._floats) if tensor.is_floating_point() else tensor


#: Names of precisions by the type of the weights in a GGUF file; other types are quantised.
_GGUF_PRECISIONS: Final = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}


class GgufEngine(NetworkEngine):
    """A GGUF file on llama.cpp; the threads of instances take turns, because a context computes one batch at a time.

    With ``ranks``, the output is that of its classifier. Raises the errors of :class:`LlamaEncoder`, UNSUPPORTED if
    llama-cpp-python is not installed.
    """

    name = "llamacpp"
    library = "llama_cpp"
    inputs = frozenset({"input_ids", "attention_mask"})

    def __init__(self, checkpoint: Checkpoint, *, ranks: bool, device: str, device_id: int) -> None:
        from conch.backends.engines.llamacpp.encoder import LlamaEncoder

        options = checkpoint.options
        spec = EngineSpec(
            checkpoint.directory,
            checkpoint.config,
            (),
            gguf=checkpoint.gguf,
            device=device,
            device_id=device_id,
            threads=options.threads or openmp_threads(usable_cores(), 1),
            dtype=options.dtype,
            arguments=library_arguments(self.name, options),
        )
        self._encoder = LlamaEncoder(spec, ranks=ranks)
        self.device = device
        self.precision = _GGUF_PRECISIONS.get(self._encoder.precision, self._encoder.precision)
        self._ranks = ranks
        self._answers = checkpoint.gguf is not None and answers_yes_or_no(checkpoint.gguf)
        self.outputs = ("logits",) if ranks else _OUTPUTS["AutoModel"]
        if options.verify_on_load:
            self.facts = {"gguf_check": self._encoder.verify()}

    def run(self, arrays: Mapping[str, Array], names: Collection[str] = ()) -> dict[str, Array]:
        real = arrays["attention_mask"] > 0
        vectors = self._encoder.run([ids[own].tolist() for ids, own in zip(arrays["input_ids"], real, strict=True)])
        if not self._ranks:
            padded = np.zeros((*real.shape, vectors.shape[1]), np.float32)
            padded[real] = vectors
            return {self.outputs[0]: padded}
        if self._answers:
            yes, no = np.log(np.maximum(vectors, np.finfo(np.float32).tiny)).T
            vectors = (yes - no)[:, None]
        return {self.outputs[0]: vectors}


#: The input for images, and the folder beside a graph for texts that has the graph for images, with the same name.
PIXELS: Final = "pixel_values"
IMAGE_FOLDER: Final = "images"


class TextImageEngine(NetworkEngine):
    """A network with a graph for texts and one for images; name, precision and outputs are those of the first."""

    def __init__(self, texts: GraphEngine, images: GraphEngine) -> None:
        self.name, self.device, self.precision = texts.name, texts.device, texts.precision
        self.inputs, self.outputs = texts.inputs | images.inputs, texts.outputs
        self._texts, self._images = texts, images

    def padded_shape(self, rows: int, length: int) -> tuple[int, int]:
        return self._texts.padded_shape(rows, length)

    def run(self, arrays: Mapping[str, Array], names: Collection[str] = ()) -> dict[str, Array]:
        return (self._images if PIXELS in arrays else self._texts).run(arrays, names)


#: The number of shapes whose engine is cached; selecting it again takes a few microseconds.
_REMEMBERED: Final = 4096


class EnginesByShape(NetworkEngine):
    """An engine that runs ``other`` if ``other_at(rows, tokens)`` is true, else ``usual``.

    The choice depends only on the shape, so the same batch always gets the same outputs. Name, precision and device are
    those of ``usual``, and so are its ``outputs``: a task over engines with different ones checks ``parts``.
    """

    def __init__(self, usual: NetworkEngine, other: NetworkEngine, other_at: Callable[[int, int], bool]) -> None:
        self.name, self.device, self.precision, self.variant = usual.name, usual.device, usual.precision, usual.variant
        self.inputs, self.outputs = usual.inputs | other.inputs, usual.outputs
        self._usual, self._other = usual, other
        self._at = lru_cache(_REMEMBERED)(lambda rows, tokens: other if other_at(rows, tokens) else usual)

    @property
    def parts(self) -> Sequence[NetworkEngine]:
        return (self._usual, self._other)

    def padded_shape(self, rows: int, length: int) -> tuple[int, int]:
        return self._at(rows, length).padded_shape(rows, length)

    def require_outputs(self, names: Collection[str], source: str) -> None:
        for engine in self.parts:
            engine.require_outputs(names, source)

    def require_tensors(self, arrays: Mapping[str, Array]) -> None:
        for engine in self.parts:
            engine.require_tensors(arrays)

    def reference(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        return self._usual.reference(arrays)

    def run(self, arrays: Mapping[str, Array], names: Collection[str] = ()) -> dict[str, Array]:
        rows, tokens = arrays["input_ids"].shape
        return self._at(rows, tokens).run(arrays, names)


def open_engine(
    checkpoint: Checkpoint,
    *,
    head: str,
    device: str = "cpu",
    device_id: int = 0,
    instances: int = 1,
    torch_class: type[TorchEngine] = TorchEngine,
    outputs: Sequence[str] = (),
    splade: tuple[str, bool] | None = None,
    methods: tuple[str, str] | None = None,
) -> NetworkEngine:
    """Open the engine for ``checkpoint`` on ``device`` (``cpu``, ``cuda``), for ``instances`` concurrent threads.

    ``head`` is the class of transformers that loads the network; only torch, ``torch_class``, uses it, ``outputs`` and
    ``splade``. With ``methods``, the network embeds texts and images, and has a graph for each. The order of precedence
    is: the variant or engine in the options, the verdict of ``conch convert`` (which may select between two variants by
    shape), the files in the folder. A verdict is measured on a CPU, so on a GPU the checkpoint's own weights take
    precedence over it. Raises INVALID_ARG if the requested variant or engine does not exist, UNSUPPORTED if a library
    is missing.
    If the second variant is UNSUPPORTED, the first runs alone and sets ``warning``.
    """
    name, precision, graph = choose(checkpoint, device)
    cores: dict[str, Any] = {"threads": checkpoint.options.threads, "instances": instances}
    engine: NetworkEngine
    if name == "torch":
        engine = torch_class(
            checkpoint.directory,
            head,
            dtype=_DTYPES.get(precision, "auto"),
            device=device,
            device_id=device_id,
            trust_remote_code=checkpoint.options.trust_remote_code,
            outputs=outputs,
            splade=splade,
            methods=methods,
            **cores,
        )
    elif name == "llamacpp":
        engine = GgufEngine(checkpoint, ranks=head.endswith("Classification"), device=device, device_id=device_id)
    elif graph is None:
        raise invalid(f"checkpoint {checkpoint.directory} has no graph for engine '{name}': convert it, or use torch")
    elif name == "openvino" and device != "cpu":
        raise unsupported("engine 'openvino' runs only on CPUs: set instance_group kind KIND_CPU, or another engine")
    elif graph.suffix == ".plan":
        raise unsupported(f"'{graph.name}' is a serialised TensorRT engine: choose a variant that is an ONNX file")
    else:
        open_graph: Callable[[Path], GraphEngine] = partial(OpenVinoEngine, precision=precision, **cores)
        if name != "openvino":
            cores |= {"device": device, "device_id": device_id, "tensorrt": name == "tensorrt"}
            open_graph = partial(OnnxRuntimeEngine, precision=precision, **cores)
        engine = open_graph(graph)
        if methods is not None:
            images = graph.parent / IMAGE_FOLDER / graph.name
            if not images.exists():
                raise unsupported(f"'{graph.name}' reads no images: convert the checkpoint, or choose engine torch")
            engine = TextImageEngine(engine, open_graph(images))
    variant, companion = checkpoint.variant, checkpoint.companion
    if variant is not None and (variant.engine, variant.precision) == (name, precision):
        engine.variant = variant.name
    if companion is None or checkpoint.manifest is None or device != "cpu":
        return engine
    beside = replace(checkpoint, variant=checkpoint.manifest.variant(companion.variant), manifest=None)
    try:
        other = open_engine(
            beside, head=head, instances=instances, torch_class=torch_class, outputs=outputs, splade=splade
        )
    except ConchError as error:
        if error.code is not Code.UNSUPPORTED:
            raise
        engine.warning = f"'{engine.variant}' runs for all shapes, as '{companion.variant}' cannot: {error.message}"
        return engine
    return EnginesByShape(engine, other, companion.faster_at)


def choose(checkpoint: Checkpoint, device: str = "cpu") -> tuple[str, str, Path | None]:
    """Return the engine's name, its precision (empty if not specified) and the graph file (None without a graph)."""
    present = engines_of(checkpoint.directory)
    if (
        device != "cpu"
        and not checkpoint.options.variant
        and checkpoint.options.engine == "auto"
        and "torch" in present
    ):
        return "torch", PRECISIONS.get(checkpoint.options.dtype, ""), None
    variant = checkpoint.variant
    if variant is not None:
        graph = checkpoint.directory / variant.path if variant.path else None
        return variant.engine, variant.precision, graph
    engine = checkpoint.engine
    return (
        engine,
        PRECISIONS.get(checkpoint.options.dtype, "") if engine == "torch" else "fp32",
        checkpoint.graph_file(engine),
    )
