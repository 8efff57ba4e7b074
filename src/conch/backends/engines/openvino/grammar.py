"""Checks before use that a grammar compiles and that its masks are fast.

An invalid grammar breaks the pipeline that runs it; a slow grammar delays all other requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from conch.backends.base.processor_time import ThreadGroup
from conch.backends.engines.openvino.config import reason, structured_output
from conch.backends.engines.openvino.precision import BLOCK
from conch.backends.generation.compilation import COMPILING
from conch.core.errors import invalid
from conch.core.sampling.structures import Structure
from conch.machine.temporary import TemporaryFolder

#: The number of tokens of each trial, and the processor time (s) allowed per trial and per token.
TRIALS: Final = (16, 64, 256)
FIRST_SECONDS: Final = 0.5
MASK_SECONDS: Final = 0.003
#: The number of valid structures that are cached.
_REMEMBERED: Final = 256


class GrammarValidator:
    """Compiles grammars in a pipeline over a minimal network and generates tokens with them.

    Masks are measured by the processor time of the threads that this pipeline starts (``processor_time``), so that a
    busy machine does not make grammars appear slow. Compiled grammars are stored in the tokenizer, which the model's
    pipeline shares. Only one thread at a time may use the validator; it does not block other threads.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, processor_time: Callable[[], float] | None = None) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._group = ThreadGroup(COMPILING)
        self._processor_time = processor_time or self._group.seconds
        self._pipeline: Any = None
        self._good: OrderedDict[Structure, None] = OrderedDict()

    def check(self, structure: Structure) -> None:
        """Raise INVALID_ARG for a structure that does not compile, or whose masks take too long."""
        if structure in self._good:
            self._good.move_to_end(structure)
            return
        with self._group.joined():
            self._try(structure)
        self._good[structure] = None
        if len(self._good) > _REMEMBERED:
            self._good.popitem(last=False)

    def _try(self, structure: Structure) -> None:
        self._generate(structure, 1)
        for tokens in TRIALS:
            before = self._processor_time()
            self._generate(structure, tokens)
            if self._processor_time() - before > FIRST_SECONDS + tokens * MASK_SECONDS:
                raise invalid(
                    f"the {structure.kind} that output must fit takes too much processor time at each token, as "
                    "repetitions within repetitions do that can be read in several ways"
                )

    def _generate(self, structure: Structure, tokens: int) -> None:
        import openvino
        import openvino_genai

        if self._pipeline is None:
            self._pipeline = self._build()
        config: Any = openvino_genai.GenerationConfig(
            max_new_tokens=tokens,
            eos_token_id=0,
            stop_token_ids={0},
            structured_output_config=structured_output(structure),
        )
        try:
            # Unlike ``step``, this releases the interpreter lock.
            self._pipeline.generate([openvino.Tensor(np.zeros((1, 1), np.int64))], [config])
        except RuntimeError as error:
            self._pipeline = None  # a pipeline keeps a failed request, so build a new one
            raise invalid(f"the {structure.kind} that output must fit is not valid: {reason(error)}") from None

    def _build(self) -> Any:
        import openvino
        import openvino_genai

        scheduler: Any = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = TRIALS[-1] // BLOCK + 2
        with TemporaryFolder() as folder:
            openvino.save_model(_network(self._vocabulary), folder / "openvino_model.xml")
            threads: Any = {"INFERENCE_NUM_THREADS": 1, "sampler_num_threads": 1}
            return openvino_genai.ContinuousBatchingPipeline(folder, self._tokenizer, scheduler, "CPU", **threads)


def _network(vocabulary: int) -> Any:
    """Build the smallest network that GenAI accepts: one attention layer with one head, and zero embeddings."""
    import openvino
    from openvino import opset13 as ops

    size = 8
    parameters: dict[str, Any] = {}
    for name, shape in {"input_ids": [-1, -1], "attention_mask": [-1, -1], "position_ids": [-1, -1]}.items():
        parameters[name] = ops.parameter(shape, openvino.Type.i64, name=name)
    parameters["beam_idx"] = ops.parameter([-1], openvino.Type.i32, name="beam_idx")
    for name, node in parameters.items():
        node.output(0).get_tensor().set_names({name})
    zero = ops.constant(np.int64(0))
    table = ops.constant(np.zeros((vocabulary, size), np.float32))
    hidden = ops.gather(table, parameters["input_ids"], zero)
    heads = ops.unsqueeze(hidden, ops.constant(np.int64(1)))
    batch = ops.gather(ops.shape_of(parameters["input_ids"]), ops.constant(np.array([0], np.int64)), zero)
    empty = ops.broadcast(
        ops.constant(np.float32(0)), ops.concat([batch, ops.constant(np.array([1, 0, size], np.int64))], 0)
    )
    kept, sinks = [], []
    for name in ("key", "value"):
        state = ops.read_value(empty, f"past.{name}", openvino.Type.f32, openvino.PartialShape([-1, 1, -1, size]))
        joined = ops.concat([ops.gather(state, parameters["beam_idx"], zero), heads], 2)
        kept.append(joined)
        sinks.append(ops.assign(joined, f"past.{name}"))
    mask = ops.unsqueeze(ops.unsqueeze(ops.convert(parameters["attention_mask"], "f32"), zero), zero)
    attended = ops.scaled_dot_product_attention(heads, kept[0], kept[1], mask)
    logits = ops.matmul(ops.squeeze(attended, ops.constant(np.int64(1))), table, False, True)
    logits.output(0).get_tensor().set_names({"logits"})
    return openvino.Model([ops.result(logits)], sinks, list(parameters.values()), "nothing")
