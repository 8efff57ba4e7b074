"""Three models that NVIDIA's server runs as well: a tokenizer, an ONNX graph, and the ensemble of both."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.pooling import PoolingPlan
from conch.convert.layout.huggingface import INSTANCE_KIND, checkpoint_files, copy, parameter_lines, quoted
from conch.convert.layout.standalone import standalone
from conch.errors import unsupported

TEMPLATE: Final = Path(__file__).parents[1] / "templates" / "tokenize_model.py"
#: The inputs of the first and the last model of the trio, by task; one text for all others.
TEXTS: Final[dict[str, tuple[str, ...]]] = {
    "question-answering": ("QUESTION", "CONTEXT"),
    "text-ranking": ("TEXT", "TEXT_PAIR"),
    "zero-shot-classification": ("TEXT", "TEXT_PAIR"),
}
#: Protocol names of ONNX's element types.
_DATATYPES: Final = {1: "FP32", 7: "INT64", 6: "INT32", 10: "FP16", 11: "FP64"}


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
    def texts(self) -> list[_TensorDeclaration]:
        """The inputs of the first model and of the ensemble."""
        return [_TensorDeclaration(name, "STRING", (-1,)) for name in TEXTS.get(self.task, ("TEXT",))]

    def write(
        self, folder: Path, checkpoint: Checkpoint, graph: Sequence[Path], pad_id: int, *, lower: bool = False
    ) -> Path:
        """Write all three below ``folder``; returns the edited graph.

        ``graph`` is the ONNX file and what lies beside it.  Texts are padded with ``pad_id``, and put into lower case
        before they reach the tokenizer if ``lower``.
        """
        version, tokenizer = folder / self.model / "1", folder / self.tokenize / "1"
        for made in (version, tokenizer, folder / self.inference / "1"):
            made.mkdir(parents=True)
        for beside in graph[1:]:
            shutil.copyfile(beside, version / beside.name)
        embeds = self.task in ("feature-extraction", "sentence-similarity")
        pooling = PoolingPlan.read(checkpoint, checkpoint.options) if embeds else None
        standalone(graph[0], version / "model.onnx", plan=pooling, pairs=len(self.texts) > 1)
        copy(checkpoint, checkpoint_files(checkpoint, weights=False), tokenizer)
        shutil.copyfile(TEMPLATE, tokenizer / "model.py")

        parameters = {"max_length": str(checkpoint.max_length), "pad_id": str(pad_id)}
        if lower:
            parameters["lower_case"] = "true"
        ids, outputs = signature(version / "model.onnx")
        # A single output is called "output", whatever the graph calls it; several keep their names.
        names = {tensor.name: "output" if len(outputs) == 1 else tensor.name for tensor in outputs}
        answers = [_TensorDeclaration(names[tensor.name], tensor.datatype, tensor.dims) for tensor in outputs]
        same_ids = {tensor.name: tensor.name for tensor in ids}
        steps = _step(self.tokenize, {tensor.name: tensor.name for tensor in self.texts}, same_ids)
        steps += _step(self.model, same_ids, names)
        for model, first_line, inputs, results, last_lines in (
            (self.model, 'backend: "onnxruntime"', ids, outputs, _instances(INSTANCE_KIND)),
            (self.tokenize, 'backend: "python"', self.texts, ids, _instances("KIND_CPU") + parameter_lines(parameters)),
            (self.inference, 'platform: "ensemble"', self.texts, answers, f"ensemble_scheduling {{\n{steps}}}\n"),
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
    """Inputs and outputs of an ONNX file, with -1 for sizes that vary.  UNSUPPORTED unless it is a network of text."""
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
