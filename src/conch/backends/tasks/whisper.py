"""Whisper's networks on OpenVINO, behind transformers' ``generate``.

``conch convert`` exports three graphs: ``encoder``; ``cross``, which computes the keys and values of cross attention
once per window; and the decoder, which keeps its KV cache as state. ``GraphWhisper`` runs them where transformers would
run its modules. Languages, prompts, suppressed tokens, timestamps, fallback temperatures, beam search, windows of long
recordings and the times of words therefore are those of transformers.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Final

import numpy as np
import openvino
import torch
import transformers
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from conch.backends.base.arrays import Array
from conch.backends.graphs.openvino import CompiledGraph, CompileSettings, runtime_error
from conch.backends.tasks.transformers import loading
from conch.checkpoints.folder import Checkpoint
from conch.core.errors import invalid

#: The folders of the other two graphs, beside the decoder's; all files have the same name.
ENCODER: Final = "encoder"
CROSS: Final = "cross"


def load_pipeline(checkpoint: Checkpoint, decoder: Path, settings: CompileSettings) -> Any:
    """Load transformers' pipeline over the exported graphs of a checkpoint; ``decoder`` is the decoder's.

    Raises INVALID_ARG if the checkpoint is not Whisper, and OpenVINO's errors.
    """
    with loading(checkpoint, "pipeline 'automatic-speech-recognition'"):
        folder = checkpoint.directory
        config = transformers.AutoConfig.from_pretrained(folder)
        if config.model_type != "whisper":
            raise invalid(f"engine 'openvino' runs Whisper, but '{checkpoint.source}' is '{config.model_type}'")
        make: Any = transformers.pipeline
        return make(
            "automatic-speech-recognition",
            model=load_model(folder, decoder, settings),
            tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
            feature_extractor=transformers.AutoFeatureExtractor.from_pretrained(folder),
            device="cpu",
            dtype=torch.float32,
        )


def load_model(folder: Path, decoder: Path, settings: CompileSettings) -> GraphWhisper:
    """Load the exported graphs of the Whisper checkpoint in ``folder``; ``decoder`` is the decoder's."""
    with torch.device("meta"):
        model = GraphWhisper(transformers.AutoConfig.from_pretrained(folder))
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    model.attach(WhisperGraphs(decoder, settings))
    model.eval()
    return model


class WhisperGraphs:
    """The compiled graphs. Several threads may run them; each has its own decoder state and its last window."""

    def __init__(self, decoder: Path, settings: CompileSettings) -> None:
        self._encoder = CompiledGraph(decoder.parent / ENCODER / decoder.name, settings)
        self._cross = CompiledGraph(decoder.parent / CROSS / decoder.name, settings)
        self._cross_names = [tensor.name for tensor in self._cross.outputs]
        try:
            core: Any = openvino.Core()
            # Cached keys and values of 8 bits, OpenVINO's default, would change what is transcribed.
            properties = {**settings.compiled(), "KV_CACHE_PRECISION": "f32"}
            self._decoder = core.compile_model(core.read_model(decoder), "CPU", properties)
        except Exception as error:
            raise runtime_error(error) from None
        self._local = threading.local()

    def encode(self, features: Any) -> Any:
        """Return the hidden states of FP32 features ``[rows, bins, frames]``.

        The states of the last features are kept, because transformers encodes a window again after it has detected its
        language, and for each fallback temperature.
        """
        local = self._local
        if not hasattr(local, "features") or not torch.equal(local.features, features):
            hidden: Any
            [hidden] = self._encoder.infer(["last_hidden_state"], {"input_features": features.numpy()})
            local.features, local.hidden, local.cross = features, torch.from_numpy(hidden), None
        return local.hidden

    def keys_and_values(self, hidden: Any) -> dict[str, Array]:
        """Return keys and values of cross attention by name, for hidden states ``[rows, frames, width]``.

        Those of the last window are kept. Equal rows, which beams have, are computed once.
        """
        local = self._local
        rows, index = _distinct_rows(hidden)
        distinct = hidden if len(rows) == len(index) else hidden[rows]
        known = hasattr(local, "hidden") and torch.equal(local.hidden, distinct)
        cross: dict[str, Array] | None = local.cross if known else None
        if cross is None:
            values: list[Any] = self._cross.infer(self._cross_names, {"last_hidden_state": distinct.numpy()})
            cross = dict(zip(self._cross_names, values, strict=True))
            if known:
                local.cross = cross
        return cross if distinct is hidden else {name: array[index] for name, array in cross.items()}

    def request(self) -> Any:
        """Return the calling thread's decoder request, with an empty KV cache."""
        if not hasattr(self._local, "request"):
            self._local.request = self._decoder.create_infer_request()
        self._local.request.reset_state()
        return self._local.request


def _distinct_rows(hidden: Any) -> tuple[list[int], list[int]]:
    """Return the rows that differ from the row before them, and for each row its position among those."""
    rows, index = [0], [0]
    for row in range(1, len(hidden)):
        if not torch.equal(hidden[row], hidden[row - 1]):
            rows.append(row)
        index.append(len(rows) - 1)
    return rows, index


class GraphCache(transformers.Cache):
    """The KV cache of one call of ``generate``, which is the state of a decoder request."""

    def __init__(self, graphs: WhisperGraphs) -> None:
        super().__init__(layers=[])
        self._graphs = graphs
        self._request: Any = None
        self._cross: dict[str, Array] = {}
        self._rows: Array | None = None
        self._length = 0

    def __len__(self) -> int:
        return 1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of cached tokens."""
        return self._length

    def reorder_cache(self, beam_idx: Any) -> None:
        """Select the rows that the next tokens continue."""
        self._rows = beam_idx.numpy().astype(np.int32)

    def run(self, hidden: Any, ids: Any, mask: Any, positions: Any) -> Any:
        """Run the decoder for INT64 ``ids`` ``[rows, tokens]``; returns its request.

        ``hidden`` are the encoder's hidden states, ``mask`` (default: ones) ``[rows, cached and new tokens]``. The next
        run of the thread overwrites the request's outputs.
        """
        rows, tokens = ids.shape
        end = self._length + tokens
        if self._request is None:
            self._request = self._graphs.request()
            self._cross = self._graphs.keys_and_values(hidden)
            for name, array in self._cross.items():
                self._request.set_tensor(name, openvino.Tensor(array, shared_memory=True))
        inputs = {
            "input_ids": ids.numpy(),
            "attention_mask": np.ones((rows, end), np.int64) if mask is None else mask.long().numpy(),
            "position_ids": np.tile(np.arange(self._length, end), (rows, 1))
            if positions is None
            else positions.numpy(),
            "beam_idx": np.arange(rows, dtype=np.int32) if self._rows is None else self._rows,
        }  # fmt: skip
        self._request.infer(inputs, share_inputs=True, share_outputs=True)
        self._length, self._rows = end, None
        return self._request

    def attention(self, heads: int, width: int) -> tuple[Any, ...]:
        """Return the weights of cross attention ``[rows, heads, tokens, frames]`` of each layer in the last run."""
        weights = []
        for layer in range(len(self._cross) // 2):
            query = torch.from_numpy(self._request.get_tensor(f"query.{layer}").data) * width**-0.5
            rows, tokens, _ = query.shape
            query = query.view(rows, tokens, heads, width).transpose(1, 2)
            keys = torch.from_numpy(self._cross[f"cross.{layer}.key"])
            weights.append(torch.softmax(query @ keys.transpose(2, 3), dim=-1))
        return tuple(weights)


class _Encoder(torch.nn.Module):
    """Stands where transformers has its encoder; ``generate`` reads the strides of its convolutions."""

    main_input_name = "input_features"

    def __init__(self, graphs: WhisperGraphs, encoder: Any) -> None:
        super().__init__()
        self._graphs = graphs
        self.conv1, self.conv2 = encoder.conv1, encoder.conv2

    def forward(self, input_features: Any, **_: Any) -> Any:
        return BaseModelOutput(last_hidden_state=self._graphs.encode(input_features))


class _Suppressed(transformers.SuppressTokensLogitsProcessor):
    """Suppresses tokens, all below the size of the vocabulary; transformers searches the vocabulary at every step."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores.index_fill(-1, self.suppress_tokens, -torch.inf)


class _SuppressedAtBegin(transformers.SuppressTokensAtBeginLogitsProcessor):
    """Suppresses tokens at the first step; transformers searches the vocabulary at every step."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        first = input_ids.shape[-1] == self.begin_index
        return scores.index_fill(-1, self.begin_suppress_tokens, -torch.inf) if first else scores


def _fast(processor: Any, vocabulary: int) -> Any:
    """Return a logits processor with the results of ``processor``, which may be faster."""
    if type(processor) is transformers.SuppressTokensLogitsProcessor:
        tokens = processor.suppress_tokens
        return _Suppressed(tokens[tokens < vocabulary].long().tolist())
    if type(processor) is transformers.SuppressTokensAtBeginLogitsProcessor:
        tokens = processor.begin_suppress_tokens
        return _SuppressedAtBegin(tokens[tokens < vocabulary].long().tolist(), processor.begin_index)
    return processor


class GraphWhisper(transformers.WhisperForConditionalGeneration):
    """Whisper without weights, for the CPU in FP32."""

    #: Properties of transformers, which reads them from the weights.
    device = torch.device("cpu")
    dtype = torch.float32
    _graphs: WhisperGraphs

    def attach(self, graphs: WhisperGraphs) -> None:
        """Run ``graphs`` in place of the modules."""
        self._graphs = graphs
        self.model.encoder = _Encoder(graphs, self.model.encoder)
        del self.model.decoder, self.proj_out

    def forward(
        self,
        input_features: Any = None,
        attention_mask: Any = None,
        decoder_input_ids: Any = None,
        decoder_attention_mask: Any = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        decoder_position_ids: Any = None,
        output_attentions: bool = False,
        **_: Any,
    ) -> Any:
        """Return logits FP32 ``[rows, tokens, vocabulary]``, valid until the next call of this thread."""
        hidden = (self.model.encoder(input_features) if encoder_outputs is None else encoder_outputs)[0]
        cache = GraphCache(self._graphs) if past_key_values is None else past_key_values
        request = cache.run(hidden, decoder_input_ids, decoder_attention_mask, decoder_position_ids)
        heads = self.config.decoder_attention_heads
        return Seq2SeqLMOutput(
            logits=torch.from_numpy(request.get_tensor("logits").data),
            past_key_values=cache,
            cross_attentions=cache.attention(heads, self.config.d_model // heads) if output_attentions else None,
            decoder_attentions=() if output_attentions else None,
        )

    def _retrieve_logit_processors(self, *arguments: Any, **keywords: Any) -> Any:
        processors = super()._retrieve_logit_processors(*arguments, **keywords)
        return [_fast(processor, self.config.vocab_size) for processor in processors or ()] or None

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *_: Any) -> None:
        model_kwargs["past_key_values"] = GraphCache(self._graphs)

    def _postprocess_outputs(self, seek_outputs: Any, *arguments: Any, **keywords: Any) -> Any:
        """Leave the cache out of the outputs of a window; transformers would copy its tensors."""
        if not isinstance(seek_outputs, torch.Tensor):
            kept = {name: value for name, value in seek_outputs.items() if name != "past_key_values"}
            seek_outputs = type(seek_outputs)(**kept)
        return super()._postprocess_outputs(seek_outputs, *arguments, **keywords)
