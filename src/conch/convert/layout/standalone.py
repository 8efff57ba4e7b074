"""Edits of an ONNX graph for servers that run the graph and nothing around it: fewer inputs, pooled outputs.

Weights beside the graph stay where they are, and must lie beside the edited one under the same name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from conch.checkpoints.pooling import PoolingPlan
from conch.errors import unsupported

EMBEDDING: Final = "embedding"
_HIDDEN: Final = "last_hidden_state"
_IDS: Final = "input_ids"
_MASK: Final = "attention_mask"
_TYPES: Final = "token_type_ids"
#: Lengths and counts are kept above these, as in sentence-transformers.
_MIN_LENGTH: Final = np.float32(1e-12)
_MIN_COUNT: Final = np.float32(1e-9)
#: What padding is lowered by before the largest value is taken.
_MASKED: Final = np.float32(-1e9)


def standalone(source: Path, target: Path, *, plan: PoolingPlan | None, pairs: bool) -> None:
    """Write ``source`` to ``target`` for clients that send ``input_ids`` and ``attention_mask``.

    Unless texts come in ``pairs``, ``token_type_ids`` become zeros inside the graph.  With a ``plan`` the only output
    is ``embedding`` FP32 ``[sequences, dimension]``.  Raises UNSUPPORTED for pooling that takes more than a few nodes.
    """
    import onnx

    model = onnx.load(source, load_external_data=False)
    if not pairs:
        _zero_types(model)
    if plan is not None:
        _pool(model, plan)
    onnx.save(model, target)


def _zero_types(model: Any) -> None:
    import onnx

    types = next((tensor for tensor in model.graph.input if tensor.name == _TYPES), None)
    if types is None:
        return
    nodes = _Nodes(model, "types")
    zero = onnx.helper.make_tensor("value", types.type.tensor_type.elem_type, [1], [0])
    nodes.add("ConstantOfShape", [nodes.add("Shape", [_IDS])], output=_TYPES, value=zero)
    # Nodes are in the order of execution: these go before those that read them.
    nodes.made.extend(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(nodes.made)
    model.graph.input.remove(types)


def _pool(model: Any, plan: PoolingPlan) -> None:
    import onnx

    if len(plan.modes) != 1 or plan.modes[0] not in ("mean", "cls", "max"):
        raise unsupported(f"--layout triton cannot put pooling by {' and '.join(plan.modes)} into the graph")
    if any(kind == "Dense" for kind, _ in plan.steps):
        raise unsupported("--layout triton cannot put the Dense module of sentence-transformers into the graph")
    nodes = _Nodes(model, "pool")
    vectors = _vectors(nodes, plan.modes[0], nodes.add("Cast", [_HIDDEN], to=onnx.TensorProto.FLOAT))
    for kind, value in plan.steps:
        vectors = _normalised(nodes, vectors) if kind == "Normalize" else _truncated(nodes, vectors, int(value))
    nodes.add("Identity", [vectors], output=EMBEDDING)
    model.graph.node.extend(nodes.made)
    del model.graph.output[:]
    shape = ["sequences", plan.dimension if plan.dimension > 0 else "size"]
    model.graph.output.append(onnx.helper.make_tensor_value_info(EMBEDDING, onnx.TensorProto.FLOAT, shape))


def _vectors(nodes: _Nodes, mode: str, hidden: str) -> str:
    """Pool ``[sequences, tokens, size]`` to ``[sequences, size]``."""
    if mode == "cls":
        return nodes.add("Gather", [hidden, nodes.constant(np.int64(0))], axis=1)
    mask = nodes.add("Unsqueeze", [nodes.add("Cast", [_MASK], to=1), nodes.constant(np.array([2]))])
    if mode == "max":
        # Padding must never be the largest: 0 where real, far below everything else where not.
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
    """Nodes for ``model``; their values have names that begin with ``conch_``, as no exporter's do."""

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
        """Add a constant of numpy's; returns its name."""
        from onnx import numpy_helper

        return self.add("Constant", [], value=numpy_helper.from_array(np.asarray(value)))

    def reduce(self, kind: str, value: str, *, keep: bool = False) -> str:
        """Reduce axis 1, which became an input in opset 13 (ReduceSum) and 18 (all others)."""
        if self.opset >= (13 if kind == "ReduceSum" else 18):
            return self.add(kind, [value, self.constant(np.array([1]))], keepdims=int(keep))
        return self.add(kind, [value], axes=[1], keepdims=int(keep))
