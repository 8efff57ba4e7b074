"""Checks that a grammar compiles before a request gets it, since a wrong one breaks the pipeline that runs it."""

from __future__ import annotations

from typing import Any

import numpy as np

from conch.backends.engines.openvino.config import reason, structured_output
from conch.errors import invalid
from conch.sampling.structures import Structure
from conch.temporary import TemporaryFolder


class GrammarValidator:
    """Compiles grammars in a pipeline over a minimal network.

    The model's pipeline finds the compiled grammars in the tokenizer, which both pipelines share.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._pipeline: Any = None

    def check(self, structure: Structure) -> None:
        """Raise INVALID_ARG for a structure that does not compile."""
        import openvino
        import openvino_genai

        if self._pipeline is None:
            self._pipeline = self._build()
        config: Any = openvino_genai.GenerationConfig(
            max_new_tokens=1, eos_token_id=0, stop_token_ids={0}, structured_output_config=structured_output(structure)
        )
        # Kept until the step, which drops requests whose handle is gone.
        handle: Any = self._pipeline.add_request(0, openvino.Tensor(np.zeros((1, 1), np.int64)), config)
        try:
            self._pipeline.step()
        except RuntimeError as error:
            handle.cancel()
            self._pipeline.step()
            raise invalid(f"the {structure.kind} that output must fit is not valid: {reason(error)}") from None

    def _build(self) -> Any:
        import openvino
        import openvino_genai

        scheduler: Any = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = 1
        with TemporaryFolder() as folder:
            openvino.save_model(_network(self._vocabulary), folder / "openvino_model.xml")
            return openvino_genai.ContinuousBatchingPipeline(folder, self._tokenizer, scheduler, "CPU")


def _network(vocabulary: int) -> Any:
    """One layer of attention with one head, over embeddings of zeros: the least that GenAI takes for a model."""
    import openvino
    from openvino import opset13 as ops

    size = 8
    made: dict[str, Any] = {}
    for name, shape in {"input_ids": [-1, -1], "attention_mask": [-1, -1], "position_ids": [-1, -1]}.items():
        made[name] = ops.parameter(shape, openvino.Type.i64, name=name)
    made["beam_idx"] = ops.parameter([-1], openvino.Type.i32, name="beam_idx")
    for name, node in made.items():
        node.output(0).get_tensor().set_names({name})
    zero = ops.constant(np.int64(0))
    table = ops.constant(np.zeros((vocabulary, size), np.float32))
    hidden = ops.gather(table, made["input_ids"], zero)
    heads = ops.unsqueeze(hidden, ops.constant(np.int64(1)))
    batch = ops.gather(ops.shape_of(made["input_ids"]), ops.constant(np.array([0], np.int64)), zero)
    empty = ops.broadcast(
        ops.constant(np.float32(0)), ops.concat([batch, ops.constant(np.array([1, 0, size], np.int64))], 0)
    )
    kept, sinks = [], []
    for name in ("key", "value"):
        state = ops.read_value(empty, f"past.{name}", openvino.Type.f32, openvino.PartialShape([-1, 1, -1, size]))
        joined = ops.concat([ops.gather(state, made["beam_idx"], zero), heads], 2)
        kept.append(joined)
        sinks.append(ops.assign(joined, f"past.{name}"))
    mask = ops.unsqueeze(ops.unsqueeze(ops.convert(made["attention_mask"], "f32"), zero), zero)
    attended = ops.scaled_dot_product_attention(heads, kept[0], kept[1], mask)
    logits = ops.matmul(ops.squeeze(attended, ops.constant(np.int64(1))), table, False, True)
    logits.output(0).get_tensor().set_names({"logits"})
    return openvino.Model([ops.result(logits)], sinks, list(made.values()), "nothing")
