"""Writes the model directories: a converted checkpoint for conch, or three models that NVIDIA's server can run, too.

The three are a tokenizer, an ONNX graph, and an ensemble of both.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from conch.backends.graphs.onnxruntime import Session, SessionSettings
from conch.backends.graphs.signature import GraphTensor
from conch.backends.tasks.engines import POOLED
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.hub import SMALL_FILES
from conch.checkpoints.modules import HEADS, NETWORKS, joined
from conch.convert.verdict import BuiltVariant
from conch.core.errors import unsupported
from conch.core.tensors import CONFIG_NAME

#: The instance kind on which variants are measured and judged.
INSTANCE_KIND: Final = "KIND_CPU"
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
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    (model / "config.pbtxt").write_text(huggingface_config(parameters), encoding="utf-8")


def checkpoint_files(checkpoint: Checkpoint, *, weights: bool, code: bool = False) -> list[Path]:
    """Return the files to copy, relative to the checkpoint: tokenizer, configuration, modules and, optionally, weights.

    Weights are those of networks: safetensors, or pickled ones if the folder has no others.
    """
    folder = checkpoint.directory
    paths = set(_network_files(folder, weights=weights, code=code)) | {folder / name for name in HEADS}
    for path, kind in _modules(checkpoint):
        own = (
            _network_files(folder / path, weights=weights, code=code) if kind in NETWORKS else (folder / path).glob("*")
        )
        paths |= set(own)
    names = (path.relative_to(folder) for path in paths if path.is_file())
    return sorted(name for name in names if name.name not in _EXCLUDED)


def _network_files(folder: Path, *, weights: bool, code: bool) -> set[Path]:
    """Return the files of a network with its tokenizer."""
    patterns = [*SMALL_FILES, "LICENSE*", *(["*.py"] if code else [])]
    paths = {path for pattern in patterns for path in folder.glob(pattern)}
    if weights:
        return paths | set(next((matches for pattern in _WEIGHTS if (matches := list(folder.glob(pattern)))), []))
    return paths - set(folder.glob("*.index.json"))


def _modules(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield folder and class name of each module of sentence-transformers outside of the checkpoint's own folder."""
    rest = [(str(module.get("path") or ""), str(module.get("type"))) for module in checkpoint.modules()]
    for path, reference in rest:
        if path:
            yield path, reference.rpartition(".")[2]
        for name in ("router_config.json", "config.json"):
            types = (checkpoint.json(joined(path, name)) or {}).get("types")
            if isinstance(types, dict):
                rest += [(joined(path, part), str(kind)) for part, kind in types.items()]
                break


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
_IDS: Final = "input_ids"
_TYPES: Final = "token_type_ids"


def standalone(source: Path, target: Path, *, pairs: bool) -> None:
    """Write ``source`` to ``target`` for clients that send ``input_ids`` and ``attention_mask``.

    Unless texts come in ``pairs``, ``token_type_ids`` become zeros inside the graph. The output of an embedding model,
    FP32 ``[sequences, dimension]``, is named ``embedding``.
    """
    import onnx

    model = onnx.load(source, load_external_data=False)
    if not pairs:
        _zero_types(model)
    pooled = next((output for output in model.graph.output if output.name == POOLED), None)
    if pooled is not None:
        model.graph.node.append(onnx.helper.make_node("Identity", [POOLED], [EMBEDDING]))
        pooled = onnx.helper.make_tensor_value_info(EMBEDDING, pooled.type.tensor_type.elem_type, _shape(pooled))
        del model.graph.output[:]
        model.graph.output.append(pooled)
    onnx.save(model, target)


def _shape(tensor: Any) -> list[int | str]:
    return [axis.dim_param or axis.dim_value for axis in tensor.type.tensor_type.shape.dim]


def _zero_types(model: Any) -> None:
    import onnx

    types = next((tensor for tensor in model.graph.input if tensor.name == _TYPES), None)
    if types is None:
        return
    zero = onnx.helper.make_tensor("value", types.type.tensor_type.elem_type, [1], [0])
    shape = "conch_shape"
    model.graph.node.insert(0, onnx.helper.make_node("Shape", [_IDS], [shape]))
    model.graph.node.insert(1, onnx.helper.make_node("ConstantOfShape", [shape], [_TYPES], value=zero))
    model.graph.input.remove(types)


TEMPLATE: Final = Path(__file__).parent / "templates" / "tokenize_model.py"
#: Inputs of the tokenizer and the ensemble by task; other tasks have one text.
TEXTS: Final[dict[str, tuple[str, ...]]] = {
    "question-answering": ("QUESTION", "CONTEXT"),
    "text-ranking": ("TEXT", "TEXT_PAIR"),
    "zero-shot-classification": ("TEXT", "TEXT_PAIR"),
}


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
    def texts(self) -> list[GraphTensor]:
        """The inputs of the tokenizer and the ensemble."""
        return [GraphTensor(name, "BYTES", (-1,)) for name in TEXTS.get(self.task, ("TEXT",))]

    def write(
        self,
        folder: Path,
        checkpoint: Checkpoint,
        graph: Sequence[Path],
        pad_id: int,
        *,
        lower: bool = False,
        prompt: str = "",
    ) -> Path:
        """Write all three models below ``folder``; returns the edited graph.

        ``graph`` is the ONNX file followed by the files beside it. Texts are padded with ``pad_id``, and lowercased
        before tokenization if ``lower``. ``prompt`` comes before each first text.
        """
        version, tokenizer = folder / self.model / "1", folder / self.tokenize / "1"
        for directory in (version, tokenizer, folder / self.inference / "1"):
            directory.mkdir(parents=True)
        for beside in graph[1:]:
            shutil.copyfile(beside, version / beside.name)
        standalone(graph[0], version / "model.onnx", pairs=len(self.texts) > 1)
        copy(checkpoint, checkpoint_files(checkpoint, weights=False), tokenizer)
        shutil.copyfile(TEMPLATE, tokenizer / "model.py")

        parameters = {"max_length": str(checkpoint.max_length), "pad_id": str(pad_id)}
        if lower:
            parameters["lower_case"] = "true"
        if prompt:
            parameters["prompt"] = prompt
        ids, outputs = signature(version / "model.onnx")
        # A single output is always named "output"; several keep their names.
        names = {tensor.name: "output" if len(outputs) == 1 else tensor.name for tensor in outputs}
        declared_outputs = [replace(tensor, name=names[tensor.name]) for tensor in outputs]
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


def _declarations(kind: str, tensors: Sequence[GraphTensor]) -> str:
    return "".join(
        f"{kind} {{ name: {quoted(tensor.name)} data_type: {CONFIG_NAME[tensor.datatype]} "
        f"dims: [ {', '.join(map(str, tensor.shape))} ] }}\n"
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


def signature(graph: Path) -> tuple[Sequence[GraphTensor], Sequence[GraphTensor]]:
    """Return the inputs and outputs of an ONNX file with the shapes that ONNX Runtime infers, which servers require.

    Raises UNSUPPORTED unless it is a network of text.
    """
    session = Session(graph, SessionSettings(graph="disable_all"))
    if any(not tensor.name.startswith((_IDS, "attention_mask", _TYPES)) for tensor in session.inputs):
        names = ", ".join(tensor.name for tensor in session.inputs)
        raise unsupported(f"--layout triton supports only text networks; this one takes {names}")
    return session.inputs, session.outputs
