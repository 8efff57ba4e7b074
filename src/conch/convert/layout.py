"""The model directories that a conversion ends in: one ``huggingface`` model, or the trio for NVIDIA's server.

Writes into a folder that nobody loads yet; ``run`` moves the result into place.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.hub import SMALL_FILES
from conch.checkpoints.pooling import PoolingPlan
from conch.convert.encoder.standalone import standalone
from conch.errors import unsupported

#: Modules of sentence-transformers are folders of their own.
_MODULES: Final = "[0-9]*_*/*"
_WEIGHTS: Final = ("*.safetensors", "pytorch_model*.bin")
_NOT: Final = ("conch.json", "model.json")

TEMPLATE: Final = Path(__file__).with_name("templates") / "tokenize_model.py"
#: The inputs of the first and the last model of the trio, by task; one text for all others.
TEXTS: Final[dict[str, tuple[str, ...]]] = {
    "question-answering": ("QUESTION", "CONTEXT"),
    "text-ranking": ("TEXT", "TEXT_PAIR"),
    "zero-shot-classification": ("TEXT", "TEXT_PAIR"),
}
_TYPES: Final = {1: "FP32", 7: "INT64", 6: "INT32", 10: "FP16", 11: "FP64"}


def checkpoint_files(checkpoint: Checkpoint, *, weights: bool, code: bool = False) -> list[Path]:
    """The files to copy, relative to the checkpoint: tokenizer, configuration, modules and, if wanted, weights.

    Weights are the safetensors, or the pickled ones of a checkpoint that has no others.
    """
    folder = checkpoint.directory
    patterns = [*SMALL_FILES, "LICENSE*", _MODULES, *(["*.py"] if code else [])]
    found = {path for pattern in patterns for path in folder.glob(pattern)}
    if weights:
        found |= set(next((paths for one in _WEIGHTS if (paths := list(folder.glob(one)))), []))
    else:
        found -= set(folder.glob("*.index.json"))
    names = (path.relative_to(folder) for path in found if path.is_file())
    return sorted(name for name in names if name.name not in _NOT)


def copy(checkpoint: Checkpoint, names: Sequence[Path], target: Path) -> None:
    """Copy files, which in the Hub's cache are links."""
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkpoint.directory / name, target / name)


def quoted(text: str) -> str:
    """A string of protobuf's text format."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def parameter(name: str, value: str) -> str:
    return f"parameters {{ key: {quoted(name)} value {{ string_value: {quoted(value)} }} }}\n"


def huggingface_config(parameters: Mapping[str, str], kind: str) -> str:
    """``config.pbtxt`` of the ``huggingface`` model; everything else is completed from the checkpoint when it loads.

    ``kind`` is where it was measured, KIND_CPU or KIND_GPU: the verdict holds there.
    """
    lines = "".join(parameter(name, value) for name, value in parameters.items())
    return (
        "# Written by conch convert; tensors and batching follow from the checkpoint.  The variant that serves is\n"
        '# "auto" of 1/conch.json; the parameter "variant" chooses another one of those that passed.\n'
        f'backend: "huggingface"\ninstance_group {{ count: 1 kind: {kind} }}\n{lines}'
    )


@dataclass(frozen=True)
class Trio:
    """``NAME_onnx_tokenize``, ``NAME_onnx_model`` and ``NAME_onnx_inference``.

    They have no batch dimension of the server's (``max_batch_size: 0``): shapes are whole, as in
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
        """In the order in which they have to appear: the ensemble after its members."""
        return self.tokenize, self.model, self.inference

    @property
    def texts(self) -> tuple[str, ...]:
        return TEXTS.get(self.task, ("TEXT",))

    def write(
        self, folder: Path, checkpoint: Checkpoint, graph: Sequence[Path], kind: str, pad_id: int, lower: bool
    ) -> None:
        """Write all three below ``folder``; ``graph`` is the ONNX file and what lies beside it."""
        inputs, outputs = self._write_graph(folder / self.model, checkpoint, graph, kind)
        tokenize = folder / self.tokenize
        (tokenize / "1").mkdir(parents=True)
        copy(checkpoint, checkpoint_files(checkpoint, weights=False), tokenize / "1")
        shutil.copyfile(TEMPLATE, tokenize / "1" / "model.py")
        parameters = {"max_length": str(checkpoint.max_length), "pad_id": str(pad_id)}
        if lower:
            parameters["lower_case"] = "true"
        (tokenize / "config.pbtxt").write_text(self._tokenize_config(inputs, parameters), encoding="utf-8")
        (folder / self.inference / "1").mkdir(parents=True)
        (folder / self.inference / "config.pbtxt").write_text(self._inference_config(inputs, outputs), encoding="utf-8")

    def _write_graph(
        self, target: Path, checkpoint: Checkpoint, graph: Sequence[Path], kind: str
    ) -> tuple[list[_TensorDeclaration], list[_TensorDeclaration]]:
        version = target / "1"
        version.mkdir(parents=True)
        for beside in graph[1:]:
            shutil.copyfile(beside, version / beside.name)
        embeds = self.task in ("feature-extraction", "sentence-similarity")
        plan = PoolingPlan.read(checkpoint, checkpoint.options) if embeds else None
        standalone(graph[0], version / "model.onnx", plan=plan, pairs=len(self.texts) > 1)
        inputs, outputs = signature(version / "model.onnx")
        (target / "config.pbtxt").write_text(
            f'backend: "onnxruntime"\nmax_batch_size: 0\n{_tensors("input", inputs)}{_tensors("output", outputs)}'
            f"instance_group {{ count: 1 kind: {kind} }}\n",
            encoding="utf-8",
        )
        return inputs, outputs

    def _tokenize_config(self, outputs: Sequence[_TensorDeclaration], parameters: Mapping[str, str]) -> str:
        texts = [_TensorDeclaration(name, "STRING", (-1,)) for name in self.texts]
        lines = "".join(parameter(name, value) for name, value in parameters.items())
        return (
            f'backend: "python"\nmax_batch_size: 0\n{_tensors("input", texts)}{_tensors("output", outputs)}'
            f"instance_group {{ count: 1 kind: KIND_CPU }}\n{lines}"
        )

    def _inference_config(self, ids: Sequence[_TensorDeclaration], outputs: Sequence[_TensorDeclaration]) -> str:
        """One output is called ``output``, whatever the graph calls it; several keep their names."""
        names = {one.name: "output" if len(outputs) == 1 else one.name for one in outputs}
        given = [_TensorDeclaration(names[one.name], one.datatype, one.dims) for one in outputs]
        texts = [_TensorDeclaration(name, "STRING", (-1,)) for name in self.texts]
        steps = _step(self.tokenize, {name: name for name in self.texts}, {one.name: one.name for one in ids})
        steps += _step(self.model, {one.name: one.name for one in ids}, names)
        return (
            f'platform: "ensemble"\nmax_batch_size: 0\n{_tensors("input", texts)}{_tensors("output", given)}'
            f"ensemble_scheduling {{\n{steps}}}\n"
        )


@dataclass(frozen=True, slots=True)
class _TensorDeclaration:
    name: str
    datatype: str
    dims: tuple[int, ...]


def _tensors(kind: str, tensors: Sequence[_TensorDeclaration]) -> str:
    return "".join(
        f"{kind} {{ name: {quoted(one.name)} data_type: TYPE_{one.datatype} "
        f"dims: [ {', '.join(map(str, one.dims))} ] }}\n"
        for one in tensors
    )


def _step(model: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> str:
    maps = [f"    input_map {{ key: {quoted(key)} value: {quoted(value)} }}\n" for key, value in inputs.items()]
    maps += [f"    output_map {{ key: {quoted(key)} value: {quoted(value)} }}\n" for key, value in outputs.items()]
    return f"  step {{\n    model_name: {quoted(model)}\n    model_version: -1\n{''.join(maps)}  }}\n"


def signature(graph: Path) -> tuple[list[_TensorDeclaration], list[_TensorDeclaration]]:
    """Inputs and outputs of an ONNX file, with -1 for what varies."""
    import onnx

    model = onnx.load(graph, load_external_data=False)
    weights = {one.name for one in model.graph.initializer}
    inputs = [_of(one) for one in model.graph.input if one.name not in weights]
    if any(not one.name.startswith(("input_ids", "attention_mask", "token_type_ids")) for one in inputs):
        names = ", ".join(one.name for one in inputs)
        raise unsupported(f"--layout triton is for networks of text; this one takes {names}")
    return inputs, [_of(one) for one in model.graph.output]


def _of(value: Any) -> _TensorDeclaration:
    tensor = value.type.tensor_type
    return _TensorDeclaration(value.name, _TYPES[tensor.elem_type], tuple(_dims(tensor.shape.dim)))


def _dims(dims: Sequence[Any]) -> Iterator[int]:
    for one in dims:
        yield one.dim_value if one.HasField("dim_value") and one.dim_value > 0 else -1
