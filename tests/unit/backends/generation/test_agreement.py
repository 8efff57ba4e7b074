"""An engine that does not reproduce the outputs of its GGUF file is refused when the model is loaded."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")
pytest.importorskip("transformers")

import gguf
import numpy as np
import torch

from conch.backends.batching.decoder import Logits
from conch.backends.generation.agreement import verify_gguf
from conch.backends.generation.engine import EngineRequest, EngineSpec, EngineUsage, GenerationEngine, Progress
from conch.backends.generation.generation_backend import open_engine, verify
from conch.checkpoints.gguf import config_of, read_gguf
from conch.core.errors import Code, ConchError, invalid
from conch.core.sampling.parameters import SamplingParams
from tests.fakes.decoder import FakeDecoder
from tests.unit.backends.batching.batches import batcher
from tests.unit.backends.generation.fake_engine import FakeEngine
from tests.unit.checkpoints.gguf_models import model, write

PROMPTS = [[3, 4, 5], [9, 8, 7, 6, 5, 4, 3, 11, 12]]


@pytest.fixture(scope="module")
def network() -> Any:
    return model("llama", hidden_size=256, num_hidden_layers=2, intermediate_size=256, initializer_range=0.1)


def engine(path: Path) -> GenerationEngine:
    file = read_gguf(path)
    return open_engine("transformers", EngineSpec(path.parent, config_of(file), (), gguf=file, threads=1))


class OtherEngine(FakeEngine):
    """The tokens of another engine."""

    def __init__(self, engine: GenerationEngine) -> None:
        super().__init__()
        self._engine = engine

    def add(self, request: EngineRequest) -> None:
        self._engine.add(request)

    def step(self) -> list[Progress]:
        return self._engine.step()

    @property
    def busy(self) -> bool:
        return self._engine.busy


def with_rounded_minima(path: Path, target: Path) -> Path:
    """The same file, with minima of Q4_1 that are multiples of their scale: what OpenVINO GenAI makes of it."""
    data = bytearray(path.read_bytes())
    for tensor in read_gguf(path).tensors.values():
        if tensor.type == gguf.GGMLQuantizationType.Q4_1:
            held = np.frombuffer(data, np.float16, tensor.size // 2, tensor.offset).reshape(-1, 10)
            held[:, 1] = held[:, 0] * np.round(held[:, 1] / np.where(held[:, 0] == 0, 1, held[:, 0]))
    target.write_bytes(data)
    return target


@pytest.mark.parametrize(
    "kind", ["F32", "F16", "BF16", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "MXFP4", "TQ1_0", "TQ2_0"]
)
def test_engine_that_computes_the_weights_is_accepted(tmp_path: Path, network: Any, kind: str) -> None:
    path = write(tmp_path / "m.gguf", "llama", network, kind)
    result = verify_gguf(engine(path), read_gguf(path), PROMPTS, 1)
    assert result == "16 of 16 tokens agree, log-probabilities differ by 0.0000 on average"


def test_engine_that_rounds_minima_is_refused(tmp_path: Path, network: Any) -> None:
    path = write(tmp_path / "m.gguf", "llama", network, "Q4_1")
    (tmp_path / "rounded").mkdir()
    rounded = engine(with_rounded_minima(path, tmp_path / "rounded" / "m.gguf"))
    with pytest.raises(
        ConchError, match=r"engine 'transformers' does not reproduce the outputs of .*m\.gguf: "
    ) as error:
        verify_gguf(rounded, read_gguf(path), PROMPTS, 1)
    assert error.value.code is Code.INVALID_ARG
    assert error.value.message.endswith(
        "; set parameter 'engine' to 'llamacpp' or 'openvino', or 'verify_on_load' to false to serve it anyway"
    )


def test_weights_that_give_no_numbers_are_refused(tmp_path: Path, network: Any) -> None:
    tensors = {"blk.0.ffn_up.weight": np.full((256, 256), np.inf, np.float32)}
    path = write(tmp_path / "m.gguf", "llama", network, tensors=tensors)
    sound = write(tmp_path / "sound.gguf", "llama", network)
    with pytest.raises(ConchError, match=f"the weights of {path} give log-probabilities that are not finite numbers"):
        verify_gguf(engine(sound), read_gguf(path), PROMPTS, 1)


def test_engine_that_reports_other_log_probabilities_is_refused(tmp_path: Path, network: Any) -> None:
    path = write(tmp_path / "m.gguf", "llama", network, "Q8_0")

    class Flattering(OtherEngine):
        """Reports a log-probability of zero."""

        def step(self) -> list[Progress]:
            progress = super().step()
            for step in progress:
                for entry in step.logprobs or ():
                    entry.logprob = 0.0
            return progress

    with pytest.raises(ConchError, match=r"16 of 16 tokens agree, log-probabilities differ by \d\.\d+ on average"):
        verify_gguf(Flattering(engine(path)), read_gguf(path), PROMPTS, 1)


def test_file_without_a_reference_is_not_checked(
    tmp_path: Path, network: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "m.gguf", "llama", network, metadata={"general.architecture": "gpt2"})
    with caplog.at_level(logging.WARNING):
        result = verify_gguf(FakeEngine(), read_gguf(path), PROMPTS, 1)
    assert result == "not checked: there is no reference for architecture 'gpt2'"
    assert caplog.messages == [f"{path} was not compared with its weights: {result.removeprefix('not checked: ')}"]


def spec(path: Path) -> EngineSpec:
    file = read_gguf(path)
    return EngineSpec(path.parent, config_of(file), (), gguf=file, threads=2)


@pytest.fixture(scope="module")
def starcoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two files of an architecture that the reference does not compute, with other weights."""
    folder = tmp_path_factory.mktemp("starcoder2")
    network = model("starcoder2")
    paths = []
    for name in ("right", "wrong"):
        (folder / name).mkdir()
        paths.append(write(folder / name / "m.gguf", "starcoder2", network))
        for parameter in network.parameters():
            parameter.data *= -1
    return paths[0], paths[1]


def test_transformers_is_the_reference_for_an_architecture_that_only_it_computes(starcoder: tuple[Path, Path]) -> None:
    right, wrong = starcoder
    assert verify(OtherEngine(engine(right)), spec(right), PROMPTS) == {
        "gguf_check": "not checked: there is no reference for architecture 'starcoder2'",
        "transformers_check": "16 of 16 tokens agree, log-probabilities differ by 0.0000 on average",
    }
    with pytest.raises(ConchError, match=f"engine 'fake' does not reproduce the outputs of {right}: ") as error:
        verify(OtherEngine(engine(wrong)), spec(right), PROMPTS)
    assert error.value.code is Code.INVALID_ARG


def test_architecture_that_nothing_else_computes_is_not_checked(tmp_path: Path, network: Any) -> None:
    path = write(tmp_path / "m.gguf", "llama", network, metadata={"general.architecture": "martian"})
    made = EngineSpec(tmp_path, {}, (), gguf=read_gguf(path), threads=2)
    results = verify(FakeEngine(), made, PROMPTS)
    assert results["gguf_check"] == "not checked: there is no reference for architecture 'martian'"
    assert results["transformers_check"].startswith("not checked: engine 'transformers' cannot load ")


def test_engine_that_fails_on_a_prompt_is_refused_and_left_without_requests(tmp_path: Path, network: Any) -> None:
    class Failing(FakeEngine):
        def step(self) -> list[Progress]:
            return [Progress(next(iter(self.running)), error=invalid("no room"))]

    failing = Failing()
    path = write(tmp_path / "m.gguf", "llama", network)
    with pytest.raises(ConchError, match="engine 'fake' fails on a prompt of the comparison at load: no room") as error:
        verify_gguf(failing, read_gguf(path), PROMPTS, 1)
    assert error.value.code is Code.INVALID_ARG
    assert not failing.busy


def test_comparison_leaves_no_trace_in_the_statistics_of_a_batcher(tmp_path: Path, network: Any) -> None:
    class NetworkDecoder(FakeDecoder):
        def compute(self, tokens: list[int], wanted: int, adapter: str) -> list[Logits]:
            with torch.inference_mode():
                return list(network(torch.tensor([tokens])).logits[0, len(tokens) - wanted :].numpy())

    path = write(tmp_path / "m.gguf", "llama", network)
    decoder = NetworkDecoder(vocabulary=96)
    engine = batcher(decoder)
    prompts = [[3] * 40, [3] * 40 + [4, 5, 6]]
    assert verify_gguf(engine, read_gguf(path), prompts, 1).startswith("16 of 16 tokens agree")
    assert decoder.runs
    assert engine.usage() == EngineUsage()
    engine.add(EngineRequest(1, prompts[0], SamplingParams(max_tokens=1)))
    engine.step()
    assert (engine.usage().prefix_queries, engine.usage().prefix_hits) == (40, 0)
