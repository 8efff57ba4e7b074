"""Images and sound on the engine ``transformers``: the same tokens as ``generate``, alone and in a busy batch."""

from __future__ import annotations

import random
import shutil
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("PIL")

import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from conch.backends.base.arrays import Request
from conch.backends.generation.engine import EngineRequest, GenerationEngine
from conch.backends.generation.lora import LoraWeights
from conch.backends.io_formats.processor import MediaProcessor
from conch.backends.tasks.media import wav
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.core.sampling.parameters import SamplingParams
from tests.checkpoints import write_adapter
from tests.media_checkpoints import FAMILIES, picture, write
from tests.task_requests import tensor
from tests.unit.backends.engines.driving import finished_by_id, tokens
from tests.unit.backends.engines.transformers.models import spec

#: Those whose prompts are read at once, and not kept for later ones.
WHOLE: Final = {"gemma3", "gemma4_large", "paligemma"}
RATE: Final = 16_000
#: What precedes the media in each prompt: more than a block of the cache of prefixes.
_BEFORE: Final = "A program takes a list of numbers and returns the even ones. " * 3
_AFTER: Final = " How can you be sure?"


class Served:
    """A family's checkpoint on the engine, and transformers itself."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.reader = MediaProcessor(Checkpoint.open(folder, Options.from_values({"task": "text-generation"})))
        self.native = self.reader.processor
        self.engine: GenerationEngine = self.opened(folder, **settings)
        self.model = transformers.AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.name, self.marks = folder.name, self.reader.marks
        self.wanted: dict[Any, list[int]] = {}

    def opened(self, folder: Path, **settings: Any) -> GenerationEngine:
        from conch.backends.generation.generation_backend import open_engine

        return open_engine("transformers", spec(folder, eos_ids=(0,), media=self.reader.spec, **settings))

    def kind(self, seed: int) -> str:
        return list(self.marks)[seed % len(self.marks)]

    def text(self, seeds: tuple[int, ...], before: str) -> str:
        return before + "".join(f"{self.marks[self.kind(seed)]} and " for seed in seeds) + _AFTER

    def files(self, seeds: tuple[int, ...]) -> dict[str, list[bytes]]:
        """The files of a prompt by kind."""
        kinds = dict.fromkeys(map(self.kind, seeds))
        return {kind: [self.file(seed) for seed in seeds if self.kind(seed) == kind] for kind in kinds}

    def file(self, seed: int) -> bytes:
        if self.kind(seed) == "image":
            return picture(seed, *((40, 24), (24, 40), (31, 31))[seed % 3])
        values = np.random.default_rng(seed).uniform(-0.5, 0.5, RATE // (1 + seed % 3)).astype(np.float32)
        return wav(values, RATE)

    def request(self, number: int, seeds: tuple[int, ...], most: int, before: str = _BEFORE) -> EngineRequest:
        tensors = {kind: tensor(kind, files) for kind, files in self.files(seeds).items()}
        items = self.reader.items(Request(tensors, frozenset()))
        text = self.reader.expand(self.text(seeds, before), items)
        prompt = self.native.tokenizer(text, add_special_tokens=False)["input_ids"]
        self.reader.check(prompt, items)
        return EngineRequest(number, prompt, SamplingParams(max_tokens=most, temperature=0), media=items)

    def expected(self, request: EngineRequest, seeds: tuple[int, ...], before: str = _BEFORE) -> list[int]:
        """What transformers makes of the same text and files."""
        asked = (tuple(request.prompt), seeds, request.sampling.max_tokens)
        if asked not in self.wanted:
            files, text = self.files(seeds), self.text(seeds, before)
            given: dict[str, Any] = {}
            if images := files.get("image"):
                given["images"] = [Image.open(BytesIO(file)) for file in images]
            if recordings := files.get("audio"):
                import soundfile

                given["audio"] = [soundfile.read(BytesIO(file), dtype="float32")[0] for file in recordings]
                given["sampling_rate"] = RATE
            if files:
                inputs = self.native(text=[text], return_tensors="pt", add_special_tokens=False, **given)
                inputs.pop("labels", None)
            else:
                inputs = self.native.tokenizer(text, return_tensors="pt", add_special_tokens=False)
            assert inputs["input_ids"][0].tolist() == request.prompt
            with torch.inference_mode():
                ids = self.model.generate(
                    **inputs, max_new_tokens=request.sampling.max_tokens, do_sample=False, eos_token_id=0
                )
            self.wanted[asked] = ids[0, len(request.prompt) :].tolist()
        return self.wanted[asked]


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = write(tmp_path_factory.mktemp("models") / request.param, request.param)
    return Served(folder, max_batched_tokens=32, max_sequences=4)


def test_a_prompt_alone_has_the_tokens_of_generate_with_and_without_its_prefix(served: Served) -> None:
    engine = served.engine
    assert engine.media == served.marks.keys() and not engine.warnings
    for seeds in ((1,), (1, 2), (2, 1), (1,), (3, 4)):
        request = served.request(0, seeds, 12)
        assert tokens(finished_by_id(engine, request)[0]) == served.expected(request, seeds)
    assert bool(engine.usage().prefix_hits) == (served.name not in WHOLE)


def test_prompts_in_a_busy_batch_have_the_tokens_of_generate(served: Served) -> None:
    engine, chance = served.engine, random.Random(4)
    asked = {
        number: (chance.choice(((), (1,), (2,), (1, 2), (5,), (6, 1))), _BEFORE[: chance.choice((0, 9, 180))])
        for number in range(14)
    }
    requests = {
        number: served.request(number, seeds, chance.choice((1, 5, 11)), before)
        for number, (seeds, before) in asked.items()
    }
    coming, got = sorted(requests), {number: list[int]() for number in requests}
    while coming or engine.busy:
        for _ in range(chance.choice((0, 1, 2))):
            if coming:
                engine.add(requests[coming.pop(0)])
        for progress in engine.step():
            assert progress.error is None
            got[progress.id] += progress.tokens
    for number, request in requests.items():
        assert got[number] == served.expected(request, *asked[number]), number


@pytest.mark.parametrize(("cache_bytes", "kept"), [(1 << 20, True), (1, False)])
def test_an_item_is_processed_once_as_long_as_the_cache_holds_it(cache_bytes: int, kept: bool, tmp_path: Path) -> None:
    folder = write(tmp_path, "llava")
    options = Options.from_values({"task": "text-generation", "media_cache_bytes": str(cache_bytes)})
    reader = MediaProcessor(Checkpoint.open(folder, options))

    def read(*files: bytes) -> list[Any]:
        return reader.items(Request({"image": tensor("image", list(files))}, frozenset()))

    first, second = read(picture(1), picture(2))
    assert first.digest != second.digest
    assert (read(picture(1)) == [first]) == kept


def test_features_of_an_image_are_those_of_the_adapter(tmp_path: Path) -> None:
    folder, merged = write(tmp_path / "llava", "llava"), tmp_path / "merged"
    write_adapter(folder, tmp_path / "own", 1)  # the encoder of images has such layers, too
    adapter = LoraWeights.read(tmp_path / "own")
    shutil.copytree(folder, merged)
    tensors = load_file(merged / "model.safetensors")
    for layer, (down, up) in adapter.layers.items():
        tensors[f"{layer}.weight"] += torch.from_numpy(up @ down)
    save_file(tensors, merged / "model.safetensors", {"format": "pt"})
    served, changed = Served(folder, adapter_folders=[tmp_path]), Served(merged)
    served.engine.attach_adapter("own", adapter)
    for number, name in enumerate(("", "own", "", "own")):
        request = served.request(number, (1,), 8)
        expected = (changed if name else served).expected(request, (1,))
        request.sampling.lora_name = name
        assert tokens(finished_by_id(served.engine, request)[number]) == expected, name
