"""Whole conversions of tiny checkpoints, with the time for measuring set to nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from conch.backends.base.arrays import Array
from conch.backends.tasks import huggingface_backend
from conch.backends.tasks.engines import NetworkEngine, open_engine
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.manifest import Latency, Manifest
from conch.checkpoints.options import Options
from conch.cli import main
from conch.convert import run, verdict
from conch.convert.encoder import conversion
from conch.convert.measure import Run, summary
from conch.convert.plan import Plan
from conch.convert.run import ConvertedModel, convert
from conch.core.errors import Code, ConchError
from conch.core.lengths import CPU_TOKENS
from conch.measure.texts.shapes import Shape
from tests.causal_rerankers import logit_scorer
from tests.convert_checkpoints import no_progress, quick_plan
from tests.task_requests import open_model
from tests.text_checkpoints import answer, request, write


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("encoder"), "AutoModel")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    return write(tmp_path_factory.mktemp("classifier"), "AutoModelForSequenceClassification", **names)


def plan(model: Path, repository: Path, **given: Any) -> Plan:
    usual = {"backends": ("torch", "onnx"), "quantize": ("none",), "batch_sizes": (1,), "sequence_lengths": (4, 8)}
    return quick_plan(model, repository, **{**usual, **given})


@pytest.fixture(scope="module")
def converted(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> ConvertedModel:
    return convert(plan(encoder, tmp_path_factory.mktemp("models"), quantize=("int8",), force=True), no_progress)


def test_manifest_tells_what_was_done_and_found(converted: ConvertedModel, encoder: Path) -> None:
    (folder,) = converted.folders
    found = Manifest.read(folder / "1")

    assert found == converted.manifest
    assert found.source.model == str(encoder)
    assert set(found.source.files) >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert [variant.name for variant in found.variants] == ["torch-fp32", "onnxruntime-fp32", "onnxruntime-int8"]
    for variant in found.variants:
        assert [(shape.batch, shape.tokens) for shape in variant.latency] == [(1, 4), (1, 8)]
        assert set(variant.agreement) == {"embedding", "recall", "task", "neighbours"}
    assert found.variants[0].agreement["task"]["value"] == 1
    assert found.variants[1].passed
    contrasts = found.variants[2].contrasts
    assert contrasts is not None and len(contrasts.worst) == 10
    assert contrasts.worst[0].difference == max(contrasts.differences) > 0
    assert found.variants[0].contrasts is None
    assert found.settings["samples"] > 90 and found.settings["data"] == "built-in"
    assert {"python", "torch", "onnxruntime"} <= set(found.versions)


def test_converted_model_is_verified_and_answers_like_the_checkpoint(converted: ConvertedModel, encoder: Path) -> None:
    arrays = {name: np.ones((2, 5), np.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}

    def answer(folder: Path, **options: Any) -> Array:
        checkpoint = Checkpoint.open(folder, Options.from_values({**options, "threads": 1}))
        return open_engine(checkpoint, head="AutoModel").run(arrays)["last_hidden_state"]

    version = converted.folders[0] / "1"
    expected = answer(encoder)
    np.testing.assert_allclose(answer(version, variant="torch-fp32"), expected, atol=1e-5)
    np.testing.assert_allclose(answer(version, variant="onnxruntime-fp32"), expected, atol=1e-4)
    assert answer(version).shape == expected.shape


def test_file_that_was_changed_afterwards_does_not_load(converted: ConvertedModel, tmp_path: Path) -> None:
    version = tmp_path / "1"
    shutil.copytree(converted.folders[0] / "1", version)
    with (version / "onnxruntime-fp32.onnx").open("ab") as file:
        file.write(b"x")

    with pytest.raises(ConchError, match=r"onnxruntime-fp32\.onnx is not the file that was converted"):
        Checkpoint.open(version)


def test_report_lies_beside_the_model(converted: ConvertedModel) -> None:
    (folder,) = converted.folders

    assert "| PyTorch (fp32) |" in (folder / "report.md").read_text()
    page = (folder / "report.html").read_text()
    assert "<svg" in page and "The ten texts with the largest differences" in page
    assert f"conch convert -m {converted.manifest.source.model} -o " in page
    assert 'backend: "huggingface"' in (folder / "config.pbtxt").read_text()


def test_existing_model_is_refused_before_anything_else(encoder: Path, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()

    with pytest.raises(ConchError, match="--overwrite") as raised:
        convert(plan(tmp_path / "there is no such checkpoint", tmp_path), no_progress)

    assert raised.value.code is Code.ALREADY_EXISTS


def test_model_is_converted_again(encoder: Path, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "old").touch()

    convert(plan(encoder, tmp_path, backends=("torch",), overwrite=True), no_progress)

    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert not (tmp_path / "m" / "old").exists()


def test_only_what_serves_is_written_when_asked(encoder: Path, tmp_path: Path) -> None:
    made = convert(plan(encoder, tmp_path, backends=("torch", "onnx"), keep="auto"), no_progress)

    version = made.folders[0] / "1"
    checkpoint = Checkpoint.open(version)
    assert checkpoint.variant is not None and checkpoint.variant.name == made.manifest.auto
    auto = checkpoint.variant
    beside = checkpoint.companion.variant if checkpoint.companion is not None else ""
    kept = {variant.name: variant.kept for variant in made.manifest.variants}
    assert kept == {name: name in (auto.name, beside) for name in kept} and not all(kept.values())
    written = {path.name for path in version.iterdir()}
    assert ("model.safetensors" in written) == ("torch-fp32" in (auto.name, beside))
    assert all(variant.latency for variant in made.manifest.variants)  # the figures stay
    other = next(name for name, is_kept in kept.items() if not is_kept)
    with pytest.raises(ConchError, match=f"the files of variant '{other}' were left out"):
        Checkpoint.open(version, Options.from_values({"variant": other}))


def test_failure_leaves_nothing_behind(encoder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConchError, match="--seq-len 9999 is more than the model accepts: at most 64 tokens"):
        convert(plan(encoder, tmp_path, sequence_lengths=(9999,)), no_progress)

    assert list(tmp_path.iterdir()) == []


def test_torch_that_was_not_requested_is_measured_and_not_written(encoder: Path, tmp_path: Path) -> None:
    made = convert(plan(encoder, tmp_path, backends=("onnx",)), no_progress)

    reference = made.manifest.variants[0]
    assert (reference.name, reference.passed, reference.reasons) == ("torch-fp32", False, (verdict.NOT_ASKED_FOR,))
    assert reference.latency
    assert made.manifest.auto == "onnxruntime-fp32"
    assert "model.safetensors" not in made.manifest.files


@pytest.fixture
def two_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime was measured to be four times as fast as PyTorch at 1x8, and a quarter as fast at 1x16."""

    def measured(runs: Mapping[Shape, Mapping[str, Run]], *arguments: Any, **options: Any) -> dict[str, list[Latency]]:
        found: dict[str, list[Latency]] = {}
        for shape, networks in runs.items():
            for name in networks:
                faster = name.startswith("onnxruntime") == (shape.tokens == 8)
                found.setdefault(name, []).append(summary(shape, [1e-3 if faster else 4.1e-3] * 9))
        return found

    monkeypatch.setattr(run, "measure", measured)


def test_two_variants_serve_where_each_is_faster(encoder: Path, tmp_path: Path, two_fast: None) -> None:
    said: list[str] = []

    made = convert(plan(encoder, tmp_path, sequence_lengths=(8, 16)), said.append)

    manifest = made.manifest
    beside = manifest.by_shape
    assert beside is not None
    assert {manifest.auto, beside.variant} == {"torch-fp32", "onnxruntime-fp32"}
    assert beside.overall == pytest.approx(4.1**0.5, abs=0.01)
    assert beside.memory_bytes > max(variant.memory_bytes for variant in manifest.variants)
    assert any(line.startswith(f"chosen: '{beside.variant}' is faster at 1x") for line in said)
    assert Manifest.read(made.folders[0] / "1") == manifest

    def opened(**options: Any) -> NetworkEngine:
        checkpoint = Checkpoint.open(made.folders[0] / "1", Options.from_values({**options, "threads": 1}))
        return open_engine(checkpoint, head="AutoModel")

    both = opened()
    assert [part.variant for part in both.parts] == [manifest.auto, beside.variant]
    assert [part.variant for part in opened(by_shape="false").parts] == [manifest.auto]
    assert [part.variant for part in opened(variant="torch-fp32").parts] == ["torch-fp32"]
    for tokens in (8, 16):
        arrays = {name: np.ones((1, tokens), np.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}
        answers = [part.run(arrays)["last_hidden_state"] for part in both.parts]
        np.testing.assert_allclose(answers[0], answers[1], atol=1e-4)


def test_reranker_over_a_language_model_serves_with_two_variants(tmp_path: Path, two_fast: None) -> None:
    folder = logit_scorer(tmp_path / "source")

    made = convert(plan(folder, tmp_path / "models", sequence_lengths=(8, 16)), no_progress)

    assert made.manifest.by_shape is not None
    pairs = request(text_input=["library"] * 2, text_pair=["near", "The library is near the station. " * 3])
    both, *alone = (
        answer(open_model(made.folders[0] / "1", **options, threads=1), pairs).outputs["score"]
        for options in ({}, {"variant": "torch-fp32"}, {"variant": "onnxruntime-fp32"})
    )
    for expected in alone:
        np.testing.assert_allclose(both, expected, atol=1e-4)


def test_variants_whose_answers_differ_do_not_serve_together(
    encoder: Path, tmp_path: Path, two_fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "together", lambda *figures: ("cosine 0.98 is below 0.9999",))

    made = convert(plan(encoder, tmp_path, sequence_lengths=(8, 16)), no_progress)

    assert made.manifest.by_shape is None
    assert made.manifest.choice[-1].endswith(
        "because the output for a text would depend on the other texts in its batch: cosine 0.98 is below 0.9999"
    )


class Wrong(NetworkEngine):
    """Another engine's answers, with noise."""

    def __init__(self, engine: NetworkEngine) -> None:
        self.engine = engine
        self.name, self.precision, self.variant = engine.name, engine.precision, engine.variant
        self.inputs, self.outputs = engine.inputs, engine.outputs

    def run(self, arrays: Mapping[str, Array], names: Collection[str] = ()) -> dict[str, Array]:
        noise = np.random.default_rng(0)
        return {
            name: (one + noise.normal(0, 9, one.shape)).astype(np.float32)
            for name, one in self.engine.run(arrays).items()
        }


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes an engine wrong, or replaces it."""
    real = conversion.open_engine

    def spoil(engine: str, kind: Callable[..., NetworkEngine] = Wrong) -> None:
        def opened(checkpoint: Checkpoint, *arguments: Any, **options: Any) -> NetworkEngine:
            made = real(checkpoint, *arguments, **options)
            return kind(made) if checkpoint.engine == engine else made

        for module in (conversion, huggingface_backend):
            monkeypatch.setattr(module, "open_engine", opened)

    return spoil


def test_variant_that_answers_otherwise_is_refused_by_name_and_number(
    encoder: Path, tmp_path: Path, spoil: Callable[..., None]
) -> None:
    spoil("onnxruntime")
    said: list[str] = []

    made = convert(plan(encoder, tmp_path), said.append)

    refused = made.manifest.variants[1]
    assert not refused.usable
    assert any(line.startswith("onnxruntime-fp32 refused: cosine_min ") for line in said)
    assert made.manifest.auto == "torch-fp32"
    assert "onnxruntime-fp32.onnx" not in made.manifest.files
    with pytest.raises(ConchError, match=r"'onnxruntime-fp32' was refused .* is below 0\.999"):
        Checkpoint.open(made.folders[0] / "1", Options(variant="onnxruntime-fp32"))


class Recorded(NetworkEngine):
    """Another engine; records the shapes of its runs, with those of all engines opened before it."""

    runs: ClassVar[list[list[tuple[int, int]]]] = []

    def __init__(self, engine: NetworkEngine) -> None:
        self.engine = engine
        self.name, self.precision, self.variant = engine.name, engine.precision, engine.variant
        self.inputs, self.outputs = engine.inputs, engine.outputs
        self.shapes: list[tuple[int, int]] = []
        self.runs.append(self.shapes)

    def run(self, arrays: Mapping[str, Array], names: Collection[str] = ()) -> dict[str, Array]:
        rows, tokens = arrays["input_ids"].shape
        self.shapes.append((rows, tokens))
        return self.engine.run(arrays)


@pytest.mark.parametrize("head", ["AutoModel", "AutoModelForSequenceClassification"])
def test_runs_have_at_most_the_tokens_of_a_run_of_the_server(
    head: str, tmp_path: Path, spoil: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write(tmp_path / "model", head, max_position_embeddings=2048)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": 2048}))
    long = [f"{word} " + "the station is open " * 300 for word in ("A", "The", "One")]
    texts = [*long, *(f"The station has {number} buses." for number in range(30))]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    monkeypatch.setattr(Recorded, "runs", [])
    monkeypatch.setattr(run, "write_report", lambda *arguments: None)  # its charts take longer than all runs
    spoil("onnxruntime", Recorded)

    convert(
        plan(model, tmp_path / "models", data=tmp_path / "texts.txt", batch_sizes=(32,), sequence_lengths=(64,)),
        no_progress,
    )

    everything = [shape for shapes in Recorded.runs for shape in shapes]
    assert all(rows == 1 or rows * tokens <= CPU_TOKENS for rows, tokens in everything)
    measured = (CPU_TOKENS // 64, 64)
    assert measured in everything
    # Engines keep the memory of their largest run, so that the one that is measured is another one.
    for shapes in Recorded.runs:
        assert measured not in shapes or max(tokens for _, tokens in shapes) <= CPU_TOKENS
    assert max(tokens for _, tokens in everything) > CPU_TOKENS


def test_variant_is_not_refused_because_its_differences_cannot_be_put_in_words(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def contrasts(*outputs: Any) -> None:
        raise OverflowError("there is no token 7")

    monkeypatch.setattr(conversion.EncoderAnswers, "contrasts", contrasts)

    made = convert(plan(classifier, tmp_path), no_progress)

    graph = made.manifest.variants[1]
    assert graph.passed and graph.contrasts is None
    assert (
        "the texts with the most different outputs of onnxruntime-fp32 are not shown: "
        "OverflowError: there is no token 7" in made.manifest.warnings
    )


class Broken(Wrong):
    """Runs nothing."""

    def run(self, arrays: Mapping[str, Array], names: Collection[str] = ()) -> dict[str, Array]:
        raise RuntimeError("no such operator")


def test_variant_that_does_not_run_is_refused_and_the_others_continue(
    classifier: Path, tmp_path: Path, spoil: Callable[..., None]
) -> None:
    spoil("onnxruntime", Broken)
    said: list[str] = []

    made = convert(plan(classifier, tmp_path), said.append)

    assert "onnxruntime-fp32: it does not run: RuntimeError: no such operator" in said
    refused = made.manifest.variants[1]
    assert (refused.usable, refused.latency, dict(refused.agreement)) == (False, (), {})
    assert made.manifest.auto == "torch-fp32"


def test_nothing_is_converted_without_a_reference(classifier: Path, tmp_path: Path, spoil: Callable[..., None]) -> None:
    spoil("torch", Broken)

    with pytest.raises(
        ConchError, match="the reference for the comparison is missing: torch-fp32: RuntimeError: no such"
    ):
        convert(plan(classifier, tmp_path), no_progress)

    assert list(tmp_path.iterdir()) == []


def test_force_is_recorded(encoder: Path, tmp_path: Path, spoil: Callable[..., None]) -> None:
    spoil("onnxruntime")

    made = convert(plan(encoder, tmp_path, backends=("onnx",), force=True), no_progress)

    forced = made.manifest.variants[1]
    assert (forced.passed, forced.forced, bool(forced.reasons)) == (False, True, True)
    assert made.manifest.auto == forced.name
    Checkpoint.open(made.folders[0] / "1", Options(variant=forced.name))


def test_no_variant_that_may_serve_is_an_error(encoder: Path, tmp_path: Path, spoil: Callable[..., None]) -> None:
    spoil("onnxruntime")

    with pytest.raises(ConchError, match=r"no variant was accepted .*onnxruntime-fp32: cosine_min .* --force"):
        convert(plan(encoder, tmp_path, backends=("onnx",)), no_progress)

    assert list(tmp_path.iterdir()) == []


def test_variant_that_cannot_be_built_is_a_line_of_the_table(encoder: Path, tmp_path: Path) -> None:
    made = convert(plan(encoder, tmp_path, backends=("torch", "tensorrt")), no_progress)

    failed = made.manifest.variants[-1]
    assert (failed.engine, failed.usable, failed.latency) == ("tensorrt", False, ())
    assert failed.reasons[0]


def test_labels_of_a_file_give_accuracy(classifier: Path, tmp_path: Path) -> None:
    rows = [{"text": f"I walk to the market {n}", "label": ("good", "bad", "0")[n % 3]} for n in range(40)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))

    made = convert(plan(classifier, tmp_path / "models", data=tmp_path / "data.jsonl"), no_progress)

    assert made.manifest.task == "text-classification"
    assert made.manifest.variants[1].agreement["task"]["name"] == "accuracy"
    assert made.manifest.settings["data"] == str(tmp_path / "data.jsonl")
    # Untrained weights cannot predict labels.
    few, at_chance = made.manifest.warnings[:2]
    assert few.startswith("only 27 samples are compared")
    assert at_chance.startswith("the checkpoint itself is at chance level on these labels")


def test_three_rows_choose_no_quantised_variant(encoder: Path, tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("I walk to the market.\nHello!\nThe library opens at nine.\n")
    said: list[str] = []

    made = convert(plan(encoder, tmp_path / "models", quantize=("int8",), data=tmp_path / "data.txt"), said.append)

    assert [line for line in said if line.startswith("warning: only 3 samples are compared")]
    int8 = made.manifest.variants[2]
    assert int8.reasons[-1] == "3 samples are too few to judge int8: at least 35 are needed"
    assert (int8.usable, made.manifest.auto.endswith("fp32")) == (False, True)
    assert "**Warning:** only 3 samples are compared" in (made.folders[0] / "report.md").read_text()


def test_trio_is_written_with_its_manifest(encoder: Path, tmp_path: Path) -> None:
    made = convert(plan(encoder, tmp_path, layout="triton", batch_sizes=(1,)), no_progress)

    assert [folder.name for folder in made.folders] == [
        "m_onnx_tokenize",
        "m_onnx_model",
        "m_onnx_inference",
    ]
    version = tmp_path / "m_onnx_model" / "1"
    assert {path.name for path in version.iterdir()} == {"model.onnx", "conch.json"}
    assert Manifest.read(version) == made.manifest
    assert made.manifest.auto.startswith("onnxruntime")


def test_converted_model_is_not_converted_again(converted: ConvertedModel, tmp_path: Path) -> None:
    with pytest.raises(ConchError, match=r"is a converted model: convert .* instead"):
        convert(plan(converted.folders[0] / "1", tmp_path), no_progress)


def test_images_are_refused(encoder: Path, tmp_path: Path) -> None:
    images = Path(shutil.copytree(encoder, tmp_path / "images"))
    (images / "preprocessor_config.json").write_text("{}")
    with pytest.raises(ConchError, match="networks for images cannot be converted"):
        convert(replace(plan(images, tmp_path), task="image-classification"), no_progress)


def test_command_prints_steps_and_the_table(encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        *("convert", "-m", str(encoder), "-o", str(tmp_path / "models"), "--name", "m", "--backend", "pytorch"),
        *("--seq-len", "4", "8", "8", "--batch-size", "1", "2", "--seconds", "0", "--verbose", "--threads", "1"),
        *("--markdown", str(tmp_path / "r.md"), "--html", str(tmp_path / "r.html")),
    ]

    assert main(command) == 0

    output = capsys.readouterr()
    assert "comparing torch-fp32" in output.err and "measuring 2x8 tokens" in output.err
    assert output.out.count("[PyTorch (fp32)]") == 4
    assert "speed-up" in output.out and "auto" in output.out
    assert f"wrote {tmp_path / 'models' / 'm'}" in output.out
    assert (tmp_path / "r.md").read_text() == (tmp_path / "models" / "m" / "report.md").read_text()
    assert (tmp_path / "r.html").exists()


def test_command_says_what_is_wrong_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "-m", "./nowhere", "-o", str(tmp_path)]) == 1

    assert capsys.readouterr().err.strip().splitlines()[-1] == "model folder './nowhere' does not exist"
