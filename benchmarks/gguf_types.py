"""Checks that engines compute correctly with the weights of GGUF files, for each type of tensor.

    python -m benchmarks.gguf_types [--types Q4_K …] [--engines openvino …] [--dtype auto|float32] [--tokens 30]

The matrices of SmolLM2-135M-Instruct are written in each type, and conch's engines continue ten prompts greedily.
The reference is transformers in float32, with the weights that the package ``gguf`` reads from the same file. A cell
shows how many tokens are also the most likely ones of the reference after the same tokens, and the mean difference of
their log-probabilities.

The model's width is 576, but a block of most types has 256 weights. Therefore the model is padded with zeros to a
width of 768, which does not change its results.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.generation import weights
from benchmarks.generation.k_quants import ENCODERS, encode
from conch.backends.generation.engine import EngineRequest, EngineSpec, GenerationEngine
from conch.backends.generation.generation_backend import open_engine
from conch.checkpoints.gguf import config_of, read_gguf
from conch.checkpoints.tokenizers.open import open_gguf
from conch.core.errors import ConchError
from conch.core.sampling.parameters import SamplingParams

#: The types that ``gguf`` can write, and the K-quants.
TYPES: Final = (
    "F32", "F16", "BF16", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "MXFP4", "TQ1_0", "TQ2_0", *ENCODERS,
)  # fmt: skip
ENGINES: Final = ("llamacpp", "openvino", "transformers")
PROMPTS: Final = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "To make bread, you need",
    "The three states of matter are",
    "def fibonacci(n):\n",
    "Dear Mr. Smith,\n\nThank you for your letter of",
    "Photosynthesis is the process by which",
    "Q: How many days are there in a leap year?\nA:",
    "The history of the Roman Empire begins with",
    "In 1969, the first humans",
)
WIDTH: Final = 768
HEADS: Final = 12
KEY_HEADS: Final = 4
#: The names of a layer's tensors in llama.cpp and in transformers.
_LAYER: Final = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


class Model:
    """The model of a GGUF file with width ``WIDTH``; only its first ``layers`` layers, unless zero."""

    def __init__(self, source: Path, layers: int = 0) -> None:
        gguf = import_module("gguf")
        self._file = read_gguf(source)
        self._layers = layers or self._file.integer("llama.block_count")
        reader = gguf.GGUFReader(source)
        self._fields = {
            name: (entry.contents(), entry.types)
            for name, entry in reader.fields.items()
            if not name.startswith(("GGUF.", "general.architecture"))
        }
        self._tensors = {
            tensor.name: _widened(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type))
            for tensor in reader.tensors
            if not tensor.name.startswith("blk.") or int(tensor.name.split(".")[1]) < self._layers
        }

    def write(self, target: Path, kind: str) -> None:
        """Write a file with the matrices as ``kind``."""
        gguf = import_module("gguf")
        writer = gguf.GGUFWriter(target, "llama")
        width = self._file.integer("llama.embedding_length")
        epsilon = "llama.attention.layer_norm_rms_epsilon"
        changed = {
            "llama.block_count": self._layers,
            "llama.embedding_length": WIDTH,
            "llama.attention.head_count": HEADS,
            "llama.attention.head_count_kv": KEY_HEADS,
            # The mean of squares is over more numbers.
            epsilon: self._file.metadata[epsilon] * width / WIDTH,
        }
        for name, (value, types) in self._fields.items():
            writer.add_key_value(name, changed.get(name, value), *types[:2])
        typed = gguf.GGMLQuantizationType[kind]
        for name, values in self._tensors.items():
            if values.ndim == 1:
                writer.add_tensor(name, values)
            else:
                packed = encode(values, kind) if kind in ENCODERS else gguf.quantize(values, typed)
                writer.add_tensor(name, packed, raw_dtype=typed)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _widened(name: str, values: Any) -> Any:
    """Pad a tensor with zeros for the additional width, query heads, and key and value heads."""
    if values.ndim == 1:
        width = len(values)
        return np.pad(values * np.float32(math.sqrt(width / WIDTH)), (0, WIDTH - width))
    part = name.split(".")[-2]
    rows, columns = values.shape
    keys = KEY_HEADS * WIDTH // HEADS
    target_rows = {"attn_q": WIDTH, "attn_k": keys, "attn_v": keys, "attn_output": WIDTH, "ffn_down": WIDTH}.get(
        part, rows
    )
    return np.pad(values, ((0, target_rows - rows), (0, 0 if part == "ffn_down" else WIDTH - columns)))


class Reference:
    """transformers in float32, with the weights of a file as the package ``gguf`` reads them."""

    def __init__(self, path: Path) -> None:
        self._torch = import_module("torch")
        transformers, gguf = import_module("transformers"), import_module("gguf")
        config = transformers.LlamaConfig(**config_of(read_gguf(path)))
        self._model = transformers.LlamaForCausalLM(config).eval()
        state = {}
        for tensor in gguf.GGUFReader(path).tensors:
            values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
            if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
                values = _reordered(values, HEADS if ".attn_q." in tensor.name else KEY_HEADS)
            state[_name(tensor.name)] = self._torch.from_numpy(values)
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
        self._model.load_state_dict(state)

    def scores(self, prompt: Sequence[int], tokens: Sequence[int]) -> Any:
        """Return the log-probabilities ``[tokens, vocabulary]`` of all tokens at the positions of ``tokens``."""
        ids = self._torch.tensor([[*prompt, *tokens[:-1]]])
        with self._torch.inference_mode():
            logits = self._model(input_ids=ids).logits[0, len(prompt) - 1 :]
        return self._torch.log_softmax(logits, -1).numpy()


def _reordered(values: Any, heads: int) -> Any:
    """Return the rows of queries or keys in transformers' order: llama.cpp pairs neighbours in rotary embeddings."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _name(name: str) -> str:
    fixed = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in fixed:
        return fixed[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_LAYER[part]}.{kind}"


def compare(engine: GenerationEngine, prompts: Sequence[Sequence[int]], reference: Reference, tokens: int) -> str:
    """Return a cell of the table."""
    for id, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=0)
        engine.add(EngineRequest(id, list(prompt), sampling))
    chosen: dict[int, list[int]] = {id: [] for id in range(len(prompts))}
    logprobs: dict[int, list[float]] = {id: [] for id in chosen}
    while engine.busy:
        for progress in engine.step():
            if progress.error is not None:
                raise progress.error
            chosen[progress.id] += progress.tokens
            logprobs[progress.id] += [token.logprob for token in progress.logprobs or ()]
    same, differences = 0, []
    for id, ids in chosen.items():
        scores = reference.scores(prompts[id], ids)
        same += int((scores.argmax(-1) == np.array(ids)).sum())
        differences += np.abs(scores[np.arange(len(ids)), ids] - np.array(logprobs[id])).tolist()
    return f"{same} of {len(differences)}, {np.mean(differences):.4f}"


def main() -> None:
    arguments = _arguments()
    source = weights.gguf()
    model, tokenizer = Model(source, arguments.layers), open_gguf(read_gguf(source))
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    print(f"| type | {' | '.join(f'`{engine}`' for engine in arguments.engines)} |")
    print(f"|---|{'---|' * len(arguments.engines)}", flush=True)
    for kind in arguments.types:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            model.write(path, kind)
            cells = _cells(path, prompts, arguments)
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)


def _cells(path: Path, prompts: Sequence[Sequence[int]], arguments: Any) -> list[str]:
    file = read_gguf(path)
    reference = Reference(path)
    cells = []
    for name in arguments.engines:
        spec = EngineSpec(path.parent, config_of(file), (), gguf=file, dtype=arguments.dtype, cache_tokens=4096)
        try:
            cells.append(compare(open_engine(name, spec), prompts, reference, arguments.tokens))
        except ConchError as error:
            cells.append(f"refused: {error.message}" if arguments.reasons else "refused")
    return cells


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", default=TYPES, choices=TYPES, metavar="TYPE")
    parser.add_argument("--engines", nargs="+", default=ENGINES, choices=ENGINES, metavar="ENGINE")
    parser.add_argument("--dtype", default="auto", help="parameter 'dtype' of the model")
    parser.add_argument("--tokens", type=int, default=30, help="new tokens for each prompt")
    parser.add_argument("--layers", type=int, default=0, help="only the first layers of the model")
    parser.add_argument("--reasons", action="store_true", help="print why an engine refused a file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
