"""Prompts with images and recordings on the engine ``llamacpp`` get the tokens that libmtmd's own functions give."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("llama_cpp") is None:
    pytest.skip("needs llama.cpp: make test-llamacpp", allow_module_level=True)

import gguf
import llama_cpp
import numpy as np
from llama_cpp import mtmd_cpp
from PIL import Image

from conch.backends.generation.engine import EngineRequest, GenerationEngine
from conch.backends.generation.media import MediaItem, ProjectorSpec
from conch.checkpoints.gguf import read_gguf
from conch.checkpoints.tokenizers.open import open_gguf
from conch.core.errors import ConchError
from conch.core.sampling.parameters import SamplingParams
from tests.llamacpp import projectors
from tests.llamacpp.models import THREADS, demo, opened
from tests.unit.backends.engines.driving import finished_by_id, tokens
from tests.unit.checkpoints import gguf_models

pytestmark = pytest.mark.timeout(300)

TEXTS = ("Look at this: ", " and tell what it is. Then compare it with ", " and with the first. ")
NEW_TOKENS = 12


def picture(seed: int, width: int = 60, height: int = 40) -> Any:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def sound(seed: int) -> Any:
    return np.random.default_rng(seed).normal(0, 0.1, 16000 * (1 + seed)).astype(np.float32)


class Helper:
    """llama.cpp's and libmtmd's own functions, with a new context for each prompt."""

    def __init__(self, model: Path, projector: Path) -> None:
        self._model = llama_cpp.llama_model_load_from_file(str(model).encode(), llama_cpp.llama_model_default_params())
        parameters = mtmd_cpp.mtmd_context_params_default()
        parameters.use_gpu, parameters.n_threads, parameters.warmup = False, THREADS, False
        self._mtmd = mtmd_cpp.mtmd_init_from_file(str(projector).encode(), self._model, parameters)
        self._vocabulary = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model)))

    @property
    def facts(self) -> tuple[bool, bool]:
        """Whether positions have several numbers, and whether the vectors of an image see each other."""
        return mtmd_cpp.mtmd_decode_use_mrope(self._mtmd), mtmd_cpp.mtmd_decode_use_non_causal(self._mtmd, None)

    def greedy(self, texts: Sequence[str], contents: Sequence[Any], count: int = NEW_TOKENS) -> list[int]:
        """Return the most likely tokens after ``texts`` with the contents between them."""
        chunks, bitmaps = mtmd_cpp.mtmd_input_chunks_init(), list(map(self._bitmap, contents))
        marker = mtmd_cpp.mtmd_default_marker()
        text = marker.join(part.encode() for part in texts)
        status = mtmd_cpp.mtmd_tokenize(
            self._mtmd, chunks, ctypes.byref(mtmd_cpp.mtmd_input_text(text, len(text), False, True)),
            (ctypes.c_void_p * len(bitmaps))(*bitmaps), len(bitmaps),
        )  # fmt: skip
        assert status == 0
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx, parameters.n_threads, parameters.n_threads_batch = 1024, THREADS, THREADS
        parameters.flash_attn_type, parameters.swa_full = -1, True
        context = llama_cpp.llama_init_from_model(self._model, parameters)
        past = llama_cpp.llama_pos(0)
        arguments = (self._mtmd, context, chunks, 0, 0, 512, True, ctypes.byref(past))
        assert mtmd_cpp.mtmd_helper_eval_chunks(*arguments) == 0
        generated: list[int] = []
        while True:
            row = llama_cpp.llama_get_logits_ith(context, -1)
            generated.append(int(np.ctypeslib.as_array(row, (self._vocabulary,)).argmax()))
            if len(generated) == count:
                break
            batch = llama_cpp.llama_batch_get_one((llama_cpp.llama_token * 1)(generated[-1]), 1)
            assert llama_cpp.llama_decode(context, batch) == 0
        llama_cpp.llama_free(context)
        return generated

    def _bitmap(self, content: Any) -> Any:
        if isinstance(content, np.ndarray):
            pointer = content.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            return mtmd_cpp.mtmd_bitmap_init_from_audio(len(content), pointer)
        pixels = np.ascontiguousarray(content)
        pointer = pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        return mtmd_cpp.mtmd_bitmap_init(content.width, content.height, pointer)


def write_qwen2vl_model(path: Path) -> Path:
    """Write a small model with positions of three numbers, random weights and the tokens of SmolLM2."""
    network = gguf_models.model("qwen2vl", vocab_size=49152, initializer_range=0.1, pad_token_id=None)
    fields = gguf.GGUFReader(demo()).fields
    names = ("model", "pre", "tokens", "token_type", "merges", "bos_token_id", "eos_token_id")
    metadata = {key: fields[key].contents() for key in (f"tokenizer.ggml.{name}" for name in names)}
    return gguf_models.write(
        path, "qwen2vl", network, metadata={**metadata, "qwen2vl.rope.dimension_sections": [2, 1, 1, 0]}
    )


class Case:
    def __init__(self, folder: Path, name: str) -> None:
        self.model = write_qwen2vl_model(folder / "model.gguf") if name == "qwen2vl" else demo()
        self.tokenizer = open_gguf(read_gguf(self.model))
        size = 32 if name == "qwen2vl" else 576
        self.projector = getattr(projectors, f"write_{name}")(folder / "mmproj.gguf", size)
        self.kind = "audio" if name == "ultravox" else "image"
        self.contents = [sound(1), sound(0)] if self.kind == "audio" else [picture(1), picture(2, 33, 90)]
        self.helper = Helper(self.model, self.projector)

    def opened(self, **fields: Any) -> Any:
        return opened(self.model, projector=ProjectorSpec(self.projector, 1 << 20), **fields)

    def items(self, engine: GenerationEngine, contents: Sequence[Any]) -> list[MediaItem]:
        assert engine.preparer is not None
        digests = [hashlib.blake2b(np.asarray(content).tobytes(), digest_size=32).digest() for content in contents]
        return [
            engine.preparer.prepare(self.kind, digest, content)
            for digest, content in zip(digests, contents, strict=True)
        ]

    def prompt(self, texts: Sequence[str], items: Sequence[MediaItem]) -> list[int]:
        ids = [self.tokenizer.encode(text, special_tokens=False) for text in texts]
        return sum(
            ([*item.arrays["tokens"].tolist(), *text] for item, text in zip(items, ids[1:], strict=True)), ids[0]
        )

    def request(
        self, id: int, engine: GenerationEngine, texts: Sequence[str], contents: Sequence[Any], **sampling: Any
    ) -> EngineRequest:
        items = self.items(engine, contents)
        values = {"temperature": 0.0, "ignore_eos": True, "max_tokens": NEW_TOKENS, **sampling}
        return EngineRequest(id, self.prompt(texts, items), SamplingParams(**values), media=items)


@pytest.fixture(scope="module", params=["llava", "gemma3", "ultravox", "qwen2vl"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp(request.param), request.param)


def test_cases_cover_kinds_of_positions_and_attention(case: Case) -> None:
    several, whole = case.helper.facts
    assert several == (case.model != demo())
    assert whole == ("gemma3" in str(case.projector))


def test_tokens_are_those_of_libmtmd_alone_and_in_a_busy_batch(case: Case) -> None:
    both, first = case.contents, case.contents[:1]
    prompts = {1: (TEXTS, both), 2: (TEXTS[:2], first), 3: (TEXTS[1:], first)}
    wanted = {id: case.helper.greedy(*prompt) for id, prompt in prompts.items()}
    assert len(set(map(tuple, wanted.values()))) == 3
    with case.opened(max_batched_tokens=40) as engine:
        assert engine.media == {case.kind} and not engine.warnings
        for id, prompt in prompts.items():
            alone = finished_by_id(engine, case.request(id, engine, *prompt))
            assert tokens(alone[id]) == wanted[id]
            engine.forget()
        busy = finished_by_id(
            engine,
            case.request(1, engine, TEXTS, both),
            EngineRequest(4, case.prompt(("One two three",), ()), SamplingParams(temperature=0, max_tokens=30)),
            case.request(2, engine, TEXTS[:2], first),
            case.request(3, engine, TEXTS[1:], first),
        )
        assert {id: tokens(busy[id]) for id in wanted} == wanted


@pytest.mark.parametrize("cache_ram", [0, 100], ids=["retained", "saved"])
def test_image_of_an_earlier_prompt_is_not_read_again(case: Case, cache_ram: int) -> None:
    wanted = case.helper.greedy((TEXTS[0], TEXTS[1] * 8), case.contents[:1])
    with case.opened(arguments={"cache_ram": cache_ram}) as engine:
        for id, texts in ((1, (TEXTS[0], TEXTS[1] * 7)), (2, (TEXTS[0], TEXTS[1] * 8))):
            steps = finished_by_id(engine, case.request(id, engine, texts, case.contents[:1]))
        assert tokens(steps[2]) == wanted
        places = case.items(engine, case.contents[:1])[0].tokens
        # With positions of several numbers, a sequence cannot be cut within an image, and it is read again.
        hits = engine.usage().prefix_hits
        assert hits > places + 32 if case.model == demo() else hits == 0
        text = EngineRequest(3, case.prompt((TEXTS[1] * 8,), ()), SamplingParams(temperature=0, max_tokens=NEW_TOKENS))
        first, second = (tokens(finished_by_id(engine, text)[3]) for _ in range(2))
        assert first == second and engine.usage().prefix_hits > hits


def test_prompt_without_a_whole_image_or_that_ends_with_one_is_refused(case: Case) -> None:
    with case.opened() as engine:
        complete = case.request(1, engine, TEXTS[:2], case.contents[:1])
        places = [place for place, token in enumerate(complete.prompt) if token < 0]
        for prompt, reason in (
            (complete.prompt[places[0] + 1 :], "have its images and recordings as a whole"),
            ([5, 6, 7], "have all of its images"),
            (complete.prompt[: places[-1] + 1], "ends with an image"),
        ):
            with pytest.raises(ConchError, match=reason):
                engine.add(EngineRequest(2, prompt, SamplingParams(), media=complete.media))
        with pytest.raises(ConchError, match="prompt_logprobs are not supported"):
            engine.add(case.request(3, engine, TEXTS[:2], case.contents[:1], prompt_logprobs=1))
        assert not engine.busy


def test_smallest_items_are_read_or_refused(case: Case) -> None:
    with case.opened() as engine:
        if case.kind == "audio":
            for samples in (0, 1):
                with pytest.raises(ConchError, match=f"a recording of {samples} samples"):
                    case.items(engine, [np.zeros(samples, np.float32)])
        content = np.zeros(2, np.float32) if case.kind == "audio" else picture(1, 1, 1)
        steps = finished_by_id(engine, case.request(1, engine, TEXTS[:2], [content]))
        assert tokens(steps[1]) == case.helper.greedy(TEXTS[:2], [content])
