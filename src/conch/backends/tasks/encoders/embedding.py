"""The task ``feature-extraction``: computes the embedding of a text, with or without sentence-transformers modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array, Request, Result, Strings
from conch.backends.tasks.encoders.encoder_task import TEXT, EncodedRequest, EncoderTask, PaddedBatch, stacked, texts_of
from conch.backends.tasks.task import OpenEngine, TaskDescription
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.pooling import Pooling, PoolingPlan, masked
from conch.core.errors import invalid, unsupported
from conch.core.inference import TensorSpec

#: Output names of exported graphs: the vectors of all tokens, and the vector of the text.
HIDDEN: Final = ("last_hidden_state", "token_embeddings")
POOLED: Final = "sentence_embedding"

#: Encoder-decoder models; sentence-transformers uses only their encoder.
ENCODER_DECODERS: Final = frozenset({"t5", "mt5", "umt5", "longt5"})


class Embedding(EncoderTask):
    """The embedding of each row; ``prompt_name`` chooses one of the checkpoint's prompts."""

    head = "AutoModel"
    reads = ()  # one of several; the constructor checks them

    def __init__(self, checkpoint: Checkpoint, open_engine: OpenEngine) -> None:
        super().__init__(checkpoint, open_engine)
        plan = PoolingPlan.read(checkpoint)
        self.pooling = Pooling(plan, checkpoint)
        names = self.engine.outputs
        self.hidden = next((name for name in HIDDEN if name in names), "")
        if not self.hidden and POOLED not in names:
            raise unsupported(
                f"'{checkpoint.source}' gives {', '.join(names)}; an embedding needs {' or '.join((*HIDDEN, POOLED))}"
            )
        prompts: dict[str, Any] = checkpoint.json("config_sentence_transformers.json") or {}
        self.prompts: dict[str, str] = dict(prompts.get("prompts") or {})
        self.default_prompt = self.prompts.get(prompts.get("default_prompt_name") or "", "")
        self.include_prompt = plan.include_prompt
        # sentence-transformers strips texts; transformers does not.
        self.strip = plan.modules
        self.lower = bool((checkpoint.json("sentence_bert_config.json") or {}).get("do_lower_case"))

    @classmethod
    def choose_head(cls, checkpoint: Checkpoint) -> str:
        return "AutoModelForTextEncoding" if checkpoint.config.get("model_type") in ENCODER_DECODERS else cls.head

    @classmethod
    def describe(cls, checkpoint: Checkpoint) -> TaskDescription:
        inputs = [TEXT]
        if (checkpoint.json("config_sentence_transformers.json") or {}).get("prompts"):
            inputs.append(TensorSpec("prompt_name", "BYTES", (1,), optional=True))
        dimension = PoolingPlan.read(checkpoint).dimension
        outputs = TensorSpec("embedding", "FP32", (dimension,)), TensorSpec("num_input_tokens", "UINT32", (1,))
        return TaskDescription(tuple(inputs), outputs)

    def prepare(self, request: Request) -> EncodedRequest:
        texts = texts_of(request, "text_input")
        prompt = self._prompt(request) if self.prompts else ""
        if prompt:
            texts = [prompt + text for text in texts]
        if self.strip:
            texts = [text.strip() for text in texts]
        if self.lower:
            texts = [text.lower() for text in texts]
        sequences, truncated = self.encoder.encode(texts)
        ignored = 0 if self.include_prompt or not prompt else self._length(prompt)
        return EncodedRequest(request, sequences, truncated, ignored)

    def _prompt(self, request: Request) -> str:
        name = self.option(request, "prompt_name")
        if name is None:
            return self.default_prompt
        try:
            return self.prompts[name]
        except KeyError:
            raise invalid(f"prompt_name is '{name}'; the checkpoint has {', '.join(self.prompts)}") from None

    def _length(self, prompt: str) -> int:
        """Return the number of prompt tokens at the start of a sequence, including special tokens."""
        item = self.encoder.encode([prompt], offsets=True)[0][0]
        return len(item.ids) - (1 if item.special and item.special[-1] else 0)

    def extract(self, outputs: Mapping[str, Array], batch: PaddedBatch) -> Iterable[Any]:
        if not self.hidden:
            return outputs[POOLED][:, : self.pooling.kept]
        mask: Array | None = batch.mask if batch.padded else None
        if not self.include_prompt:
            mask = masked(batch.mask, [encoded.state for encoded in batch.requests])
        return self.pooling(outputs[self.hidden], mask)

    def assemble(self, encoded: EncodedRequest, values: list[Any]) -> Result:
        outputs: dict[str, Array | Strings] = {"embedding": stacked(values)}
        if "num_input_tokens" in encoded.request.outputs:
            outputs["num_input_tokens"] = np.array([[len(item.ids)] for item in encoded.sequences], np.uint32)
        return Result(outputs)
