"""Edits of an ONNX graph for servers that run the graph and nothing around it: fewer inputs, pooled outputs.

Weights beside the graph stay where they are, and must lie beside the edited one under the same name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from conch.checkpoints.pooling import PoolingPlan
from conch.errors import unsupported

EMBEDDING: Final = "embedding"
_HIDDEN: Final = "last_hidden_state"
_IDS: Final = "input_ids"
_MASK: Final = "attention_mask"
_TYPES: Final = "token_type_ids"
#: Lengths and counts are kept above these, as in sentence-transformers.
_LEAST_LENGTH: Final = 1e-12
_LEAST_COUNT: Final = 1e-9
_MASKED: Final = -1e9


def standalone(source: Path, target: Path, *, plan: PoolingPlan | None, pairs: bool) -> None:
    """Write ``source`` to ``target`` for clients that send ``input_ids`` and ``attention_mask``.

    Unless texts come in ``pairs``, ``token_type_ids`` become zeros inside the graph.  With a ``plan`` the only output
    is ``embedding`` FP32 ``[sequences, dimension]``.  Raises UNSUPPORTED for pooling that takes more than a few nodes.
    """
    import onnx

    model = onnx.load(source, load_external_data=False)
    nodes = _Nodes(_opset(model))
    if not pairs:
        _zero_types(model, nodes)
    if plan is not None:
        _pool(model, nodes, plan)
    model.graph.initializer.extend(nodes.constants)
    onnx.save(model, target)


def _zero_types(model: Any, nodes: _Nodes) -> None:
    import onnx

    given = next((one for one in model.graph.input if one.name == _TYPES), None)
    if given is None:
        return
    zero = onnx.helper.make_tensor("value", given.type.tensor_type.elem_type, [1], [0])
    nodes.add("ConstantOfShape", [nodes.add("Shape", [_IDS])], output=_TYPES, value=zero)
    rest = list(model.graph.node)
    del model.graph.node[:]
    # Before those that read them: nodes are in the order of execution.
    model.graph.node.extend([*nodes.made, *rest])
    nodes.made.clear()
    model.graph.input.remove(given)


def _pool(model: Any, nodes: _Nodes, plan: PoolingPlan) -> None:
    import onnx

    if len(plan.modes) != 1 or plan.modes[0] not in ("mean", "cls", "max"):
        raise unsupported(f"--layout triton cannot put pooling by {' and '.join(plan.modes)} into the graph")
    if any(kind != "Normalize" for kind, _ in plan.steps):
        raise unsupported("--layout triton cannot put the Dense module of sentence-transformers into the graph")
    hidden = nodes.add("Cast", [_HIDDEN], to=onnx.TensorProto.FLOAT)
    vectors = _vectors(nodes, plan.modes[0], hidden)
    for _ in plan.steps:
        vectors = _normalised(nodes, vectors)
    nodes.add("Identity", [vectors], output=EMBEDDING)
    model.graph.node.extend(nodes.made)
    del model.graph.output[:]
    shape = ["sequences", plan.dimension if plan.dimension > 0 else "size"]
    model.graph.output.append(onnx.helper.make_tensor_value_info(EMBEDDING, onnx.TensorProto.FLOAT, shape))


def _vectors(nodes: _Nodes, mode: str, hidden: str) -> str:
    if mode == "cls":
        return nodes.add("Gather", [hidden, nodes.integers(0, scalar=True)], axis=1)
    mask = nodes.add("Unsqueeze", [nodes.add("Cast", [_MASK], to=1), nodes.integers(2)])
    if mode == "max":
        # Padding must never be the largest: 0 where real, far below everything else where not.
        away = nodes.add("Mul", [nodes.add("Sub", [nodes.number(1.0), mask]), nodes.number(_MASKED)])
        return nodes.reduce("ReduceMax", nodes.add("Add", [hidden, away]), 1)
    total = nodes.reduce("ReduceSum", nodes.add("Mul", [hidden, mask]), 1)
    count = nodes.add("Max", [nodes.reduce("ReduceSum", mask, 1), nodes.number(_LEAST_COUNT)])
    return nodes.add("Div", [total, count])


def _normalised(nodes: _Nodes, vectors: str) -> str:
    squares = nodes.reduce("ReduceSum", nodes.add("Mul", [vectors, vectors]), 1, keep=True)
    length = nodes.add("Max", [nodes.add("Sqrt", [squares]), nodes.number(_LEAST_LENGTH)])
    return nodes.add("Div", [vectors, length])


class _Nodes:
    """Nodes and constants with names that no exporter uses."""

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.named = 0
        self.made: list[Any] = []
        self.constants: list[Any] = []

    def add(self, kind: str, inputs: list[str], *, output: str = "", **attributes: Any) -> str:
        """A node, by the name of its output."""
        import onnx

        self.named += 1
        output = output or f"conch_{self.named}"
        self.made.append(onnx.helper.make_node(kind, inputs, [output], **attributes))
        return output

    def reduce(self, kind: str, value: str, axis: int, *, keep: bool = False) -> str:
        """Axes became an input in opset 13 (ReduceSum) and 18 (all others)."""
        if self.opset >= (13 if kind == "ReduceSum" else 18):
            return self.add(kind, [value, self.integers(axis)], keepdims=int(keep))
        return self.add(kind, [value], axes=[axis], keepdims=int(keep))

    def integers(self, value: int, *, scalar: bool = False) -> str:
        import onnx

        return self._constant(onnx.TensorProto.INT64, value, [] if scalar else [1])

    def number(self, value: float) -> str:
        import onnx

        return self._constant(onnx.TensorProto.FLOAT, value, [])

    def _constant(self, datatype: int, value: float, shape: list[int]) -> str:
        import onnx

        name = f"conch_constant_{len(self.constants)}"
        self.constants.append(onnx.helper.make_tensor(name, datatype, shape, [value]))
        return name


def _opset(model: Any) -> int:
    return int(next(one.version for one in model.opset_import if one.domain in ("", "ai.onnx")))
