"""Writes the model directories: a converted checkpoint for conch, or three models that NVIDIA's server can run, too.

The three are a tokenizer, an ONNX graph, and an ensemble of both.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.hub import SMALL_FILES
from conch.checkpoints.modules import EmbeddingModel
from conch.convert.verdict import BuiltVariant
from conch.core.errors import unsupported

#: The instance kind on which variants are measured and judged.
INSTANCE_KIND: Final = "KIND_CPU"
#: Modules of sentence-transformers are in their own folders.
_MODULES: Final = "[0-9]*_*/*"
_WEIGHTS: Final = ("*.safetensors", "pytorch_model*.bin")
_EXCLUDED: Final = ("conch.json", "model.json")


def write_huggingface(
    model: Path, checkpoint: Checkpoint, variants: Sequence[BuiltVariant], built: Path, parameters: Mapping[str, str]
) -> None:
    """Write the model directory ``model``; files of ``variants`` are moved there from the folder ``built``.

    Copies weights if torch is among the variants, and Python code if ``parameters`` trust it.
    """
    version = model / "1"
    version.mkdir(parents=True)
    weights = any(variant.path is None for variant in variants)
    copy(checkpoint, checkpoint_files(checkpoint, weights=weights, code="trust_remote_code" in parameters), version)
    for path in {file for variant in variants for file in variant.files}:
        target = version / path.relative_to(built)
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
    (model / "config.pbtxt").write_text(huggingface_config(parameters), encoding="utf-8")


def checkpoint_files(checkpoint: Checkpoint, *, weights: bool, code: bool = False) -> list[Path]:
    """Return the files to copy, relative to the checkpoint: tokenizer, configuration, modules and, optionally, weights.

    Weights are safetensors, or pickled ones if the checkpoint has no others.
    """
    folder = checkpoint.directory
    patterns = [*SMALL_FILES, "LICENSE*", _MODULES, *(["*.py"] if code else [])]
    paths = {path for pattern in patterns for path in folder.glob(pattern)}
    if weights:
        paths |= set(next((matches for pattern in _WEIGHTS if (matches := list(folder.glob(pattern)))), []))
    else:
        paths -= set(folder.glob("*.index.json"))
    names = (path.relative_to(folder) for path in paths if path.is_file())
    return sorted(name for name in names if name.name not in _EXCLUDED)


def copy(checkpoint: Checkpoint, names: Sequence[Path], target: Path) -> None:
    """Copy files of the checkpoint, following links, because the Hub's cache consists of links."""
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkpoint.directory / name, target / name)


def huggingface_config(parameters: Mapping[str, str]) -> str:
    """Return ``config.pbtxt`` of the model; the rest is completed from the checkpoint at load."""
    return (
        "# Written by conch convert; tensors and batching follow from the checkpoint.  The variant that serves is\n"
        '# "auto" of 1/conch.json; the parameter "variant" chooses another one of those that passed.\n'
        f'backend: "huggingface"\ninstance_group {{ count: 1 kind: {INSTANCE_KIND} }}\n{parameter_lines(parameters)}'
    )


def parameter_lines(parameters: Mapping[str, str]) -> str:
    """Return the model parameters of a ``config.pbtxt``."""
    return "".join(
        f"parameters {{ key: {quoted(name)} value {{ string_value: {quoted(value)} }} }}\n"
        for name, value in parameters.items()
    )


def quoted(text: str) -> str:
    """Return a string in protobuf's text format."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


# Weights outside of the graph are not changed, and must be beside the edited graph with the same name.


EMBEDDING: Final = "embedding"
_HIDDEN: Final = "last_hidden_state"
_IDS: Final = "input_ids"
_MASK: Final = "attention_mask"
_TYPES: Final = "token_type_ids"
#: Lower bounds of lengths and counts, as in sentence-transformers.
_MIN_LENGTH: Final = np.float32(1e-12)
_MIN_COUNT: Final = np.float32(1e-9)
#: Added to padding before the maximum is taken.
_MASKED: Final = np.float32(-1e9)


def standalone(source: Path, target: Path, *, embedding: EmbeddingModel | None, pairs: bool) -> None:
    """Write ``source`` to ``target`` for clients that send ``input_ids`` and ``attention_mask``.

    Unless texts come in ``pairs``, ``token_type_ids`` become zeros inside the graph. With ``embedding``, the only
    output is ``embedding`` FP32 ``[sequences, dimension]``. Raises UNSUPPORTED for pooling that needs more than a few
    nodes.
    """
    import onnx

    model = onnx.load(source, load_external_data=False)
    if not pairs:
        _zero_types(model)
    if embedding is not None:
        _pool(model, embedding)
    onnx.save(model, target)


def _zero_types(model: Any) -> None:
    import onnx

    types = next((tensor for tensor in model.graph.input if tensor.name == _TYPES), None)
    if types is None:
        return
    nodes = _Nodes(model, "types")
    zero = onnx.helper.make_tensor("value", types.type.tensor_type.elem_type, [1], [0])
    nodes.add("ConstantOfShape", [nodes.add("Shape", [_IDS])], output=_TYPES, value=zero)
    # Nodes are in execution order: these precede the nodes that read them.
    nodes.made.extend(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(nodes.made)
    model.graph.input.remove(types)


def _pool(model: Any, embedding: EmbeddingModel) -> None:
    import onnx

    _, *modules = embedding.path_of(None)
    pooling = modules.pop(0) if modules and modules[0].kind == "Pooling" else None
    if pooling is None or len(pooling.modes) != 1 or pooling.modes[0] not in ("mean", "cls", "max"):
        how = f"pooling by {' and '.join(pooling.modes)}" if pooling else f"the module '{modules[0].kind}'"
        raise unsupported(f"--layout triton cannot put {how} into the graph")
    other = next((module.kind for module in modules if module.kind not in ("Normalize", "Dropout")), "")
    if other:
        raise unsupported(f"--layout triton cannot put the {other} module of sentence-transformers into the graph")
    nodes = _Nodes(model, "pool")
    vectors = _vectors(nodes, pooling.modes[0], nodes.add("Cast", [_HIDDEN], to=onnx.TensorProto.FLOAT))
    for module in modules:
        if module.kind == "Normalize":
            vectors = _normalised(nodes, vectors)
    if embedding.truncate_dim:
        vectors = _truncated(nodes, vectors, embedding.truncate_dim)
    if embedding.normalize:
        vectors = _normalised(nodes, vectors)
    nodes.add("Identity", [vectors], output=EMBEDDING)
    model.graph.node.extend(nodes.made)
    del model.graph.output[:]
    shape = ["sequences", embedding.dimension if embedding.dimension > 0 else "size"]
    model.graph.output.append(onnx.helper.make_tensor_value_info(EMBEDDING, onnx.TensorProto.FLOAT, shape))


def _vectors(nodes: _Nodes, mode: str, hidden: str) -> str:
    """Pool ``[sequences, tokens, size]`` to ``[sequences, size]``."""
    if mode == "cls":
        return nodes.add("Gather", [hidden, nodes.constant(np.int64(0))], axis=1)
    mask = nodes.add("Unsqueeze", [nodes.add("Cast", [_MASK], to=1), nodes.constant(np.array([2]))])
    if mode == "max":
        # Padding must never be the maximum: add 0 to real tokens and a very low number to padding.
        unreal = nodes.add("Sub", [nodes.constant(np.float32(1)), mask])
        far_below = nodes.add("Mul", [unreal, nodes.constant(_MASKED)])
        return nodes.reduce("ReduceMax", nodes.add("Add", [hidden, far_below]))
    total = nodes.reduce("ReduceSum", nodes.add("Mul", [hidden, mask]))
    count = nodes.add("Max", [nodes.reduce("ReduceSum", mask), nodes.constant(_MIN_COUNT)])
    return nodes.add("Div", [total, count])


def _normalised(nodes: _Nodes, vectors: str) -> str:
    squares = nodes.reduce("ReduceSum", nodes.add("Mul", [vectors, vectors]), keep=True)
    length = nodes.add("Max", [nodes.add("Sqrt", [squares]), nodes.constant(_MIN_LENGTH)])
    return nodes.add("Div", [vectors, length])


def _truncated(nodes: _Nodes, vectors: str, size: int) -> str:
    begin, end, axis = (nodes.constant(np.array([number])) for number in (0, size, 1))
    return nodes.add("Slice", [vectors, begin, end, axis])


class _Nodes:
    """Adds nodes to ``model``; names of values begin with ``conch_``, which no exporter uses."""

    def __init__(self, model: Any, prefix: str) -> None:
        self.opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
        self.prefix = prefix
        self.made: list[Any] = []

    def add(self, kind: str, inputs: list[str], *, output: str = "", **attributes: Any) -> str:
        """Add a node; returns the name of its output."""
        import onnx

        output = output or f"conch_{self.prefix}_{len(self.made)}"
        self.made.append(onnx.helper.make_node(kind, inputs, [output], **attributes))
        return output

    def constant(self, value: Any) -> str:
        """Add a numpy constant; returns its name."""
        from onnx import numpy_helper

        return self.add("Constant", [], value=numpy_helper.from_array(np.asarray(value)))

    def reduce(self, kind: str, value: str, *, keep: bool = False) -> str:
        """Reduce axis 1, which became an input in opset 13 (ReduceSum) and 18 (all others)."""
        if self.opset >= (13 if kind == "ReduceSum" else 18):
            return self.add(kind, [value, self.constant(np.array([1]))], keepdims=int(keep))
        return self.add(kind, [value], axes=[1], keepdims=int(keep))


TEMPLATE: Final = Path(__file__).parent / "templates" / "tokenize_model.py"
#: Inputs of the tokenizer and the ensemble by task; other tasks have one text.
TEXTS: Final[dict[str, tuple[str, ...]]] = {
    "question-answering": ("QUESTION", "CONTEXT"),
    "text-ranking": ("TEXT", "TEXT_PAIR"),
    "zero-shot-classification": ("TEXT", "TEXT_PAIR"),
}
#: Protocol names of ONNX element types.
_DATATYPES: Final = {1: "FP32", 7: "INT64", 6: "INT32", 10: "FP16", 11: "FP64"}


@dataclass(frozen=True)
class EnsembleModels:
    """The models ``NAME_onnx_tokenize``, ``NAME_onnx_model`` and ``NAME_onnx_inference``.

    They have no server-side batch dimension (``max_batch_size: 0``): shapes are complete, as in
    ``--shape input_ids:8,384`` and ``--shape TEXT:1``.
    """

    name: str
    task: str

    @property
    def tokenize(self) -> str:
        return f"{self.name}_onnx_tokenize"

    @property
    def model(self) -> str:
        return f"{self.name}_onnx_model"

    @property
    def inference(self) -> str:
        return f"{self.name}_onnx_inference"

    @property
    def names(self) -> tuple[str, str, str]:
        """The names in publishing order: the ensemble after its steps' models."""
        return self.tokenize, self.model, self.inference

    @property
    def texts(self) -> list[_TensorDeclaration]:
        """The inputs of the tokenizer and the ensemble."""
        return [_TensorDeclaration(name, "STRING", (-1,)) for name in TEXTS.get(self.task, ("TEXT",))]

    def write(
        self, folder: Path, checkpoint: Checkpoint, graph: Sequence[Path], pad_id: int, *, lower: bool = False
    ) -> Path:
        """Write all three models below ``folder``; returns the edited graph.

        ``graph`` is the ONNX file followed by the files beside it. Texts are padded with ``pad_id``, and lowercased
        before tokenization if ``lower``.
        """
        version, tokenizer = folder / self.model / "1", folder / self.tokenize / "1"
        for directory in (version, tokenizer, folder / self.inference / "1"):
            directory.mkdir(parents=True)
        for beside in graph[1:]:
            shutil.copyfile(beside, version / beside.name)
        embeds = self.task in ("feature-extraction", "sentence-similarity")
        embedding = EmbeddingModel.read(checkpoint) if embeds else None
        standalone(graph[0], version / "model.onnx", embedding=embedding, pairs=len(self.texts) > 1)
        copy(checkpoint, checkpoint_files(checkpoint, weights=False), tokenizer)
        shutil.copyfile(TEMPLATE, tokenizer / "model.py")

        parameters = {"max_length": str(checkpoint.max_length), "pad_id": str(pad_id)}
        if lower:
            parameters["lower_case"] = "true"
        ids, outputs = signature(version / "model.onnx")
        # A single output is always named "output"; several keep their names.
        names = {tensor.name: "output" if len(outputs) == 1 else tensor.name for tensor in outputs}
        declared_outputs = [_TensorDeclaration(names[tensor.name], tensor.datatype, tensor.dims) for tensor in outputs]
        same_ids = {tensor.name: tensor.name for tensor in ids}
        steps = _step(self.tokenize, {tensor.name: tensor.name for tensor in self.texts}, same_ids)
        steps += _step(self.model, same_ids, names)
        for model, first_line, inputs, results, last_lines in (
            (self.model, 'backend: "onnxruntime"', ids, outputs, _instances(INSTANCE_KIND)),
            (self.tokenize, 'backend: "python"', self.texts, ids, _instances("KIND_CPU") + parameter_lines(parameters)),
            (
                self.inference,
                'platform: "ensemble"',
                self.texts,
                declared_outputs,
                f"ensemble_scheduling {{\n{steps}}}\n",
            ),
        ):
            tensors = _declarations("input", inputs) + _declarations("output", results)
            config = f"{first_line}\nmax_batch_size: 0\n{tensors}{last_lines}"
            (folder / model / "config.pbtxt").write_text(config, encoding="utf-8")
        return version / "model.onnx"


@dataclass(frozen=True, slots=True)
class _TensorDeclaration:
    name: str
    datatype: str
    dims: tuple[int, ...]


def _declarations(kind: str, tensors: Sequence[_TensorDeclaration]) -> str:
    return "".join(
        f"{kind} {{ name: {quoted(tensor.name)} data_type: TYPE_{tensor.datatype} "
        f"dims: [ {', '.join(map(str, tensor.dims))} ] }}\n"
        for tensor in tensors
    )


def _instances(kind: str) -> str:
    return f"instance_group {{ count: 1 kind: {kind} }}\n"


def _step(model: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> str:
    maps = "".join(
        f"    {kind} {{ key: {quoted(key)} value: {quoted(value)} }}\n"
        for kind, names in (("input_map", inputs), ("output_map", outputs))
        for key, value in names.items()
    )
    return f"  step {{\n    model_name: {quoted(model)}\n    model_version: -1\n{maps}  }}\n"


def signature(graph: Path) -> tuple[list[_TensorDeclaration], list[_TensorDeclaration]]:
    """Return the inputs and outputs of an ONNX file, with -1 for dynamic sizes.

    Raises UNSUPPORTED unless it is a network of text.
    """
    import onnx

    model = onnx.load(graph, load_external_data=False)
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [_declaration(tensor) for tensor in model.graph.input if tensor.name not in weights]
    if any(not tensor.name.startswith(("input_ids", "attention_mask", "token_type_ids")) for tensor in inputs):
        names = ", ".join(tensor.name for tensor in inputs)
        raise unsupported(f"--layout triton is for networks of text; this one takes {names}")
    return inputs, [_declaration(tensor) for tensor in model.graph.output]


def _declaration(value: Any) -> _TensorDeclaration:
    tensor = value.type.tensor_type
    dims = (dim.dim_value if dim.HasField("dim_value") and dim.dim_value > 0 else -1 for dim in tensor.shape.dim)
    return _TensorDeclaration(value.name, _DATATYPES[tensor.elem_type], tuple(dims))
