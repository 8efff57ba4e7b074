"""``conch convert --report``: the report of a model that was converted, made again of its manifest alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from conch.checkpoints.manifest import Source
from conch.cli import main
from conch.convert.report.table import short_report
from conch.measure.reports.text import markdown
from tests.unit.convert.report.test_document import MANIFEST

WRITTEN = replace(MANIFEST, files={"a.onnx": "sha256:12", "b.onnx": "sha256:34"})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with two versions, of which only manifests are left; ``abc`` is the revision of the later one."""
    for version, revision in (("9", "older"), ("10", "abc")):
        folder = tmp_path / "m" / version
        folder.mkdir(parents=True)
        replace(WRITTEN, source=replace(WRITTEN.source, revision=revision)).write(folder)
    return tmp_path / "m"


def test_report_of_the_latest_version_is_shown_again(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = model.parent / "again.md"

    assert main(["convert", "--report", str(model), "--markdown", str(again), "--verbose"]) == 0

    assert again.read_text() == markdown(short_report(WRITTEN))
    output = capsys.readouterr().out
    assert "ONNX Runtime (int8)" in output and "conch serve" not in output
    assert output.count("[PyTorch (fp32)]") == 2
    page = model.parent / "again.html"
    assert main(["convert", "--report", str(model / "9"), "--markdown", str(again), "--html", str(page)]) == 0
    assert "<title>Conversion of org/&lt;model&gt;|x</title>" in page.read_text()
    replace(WRITTEN, source=Source("/data/checkpoints/model", "")).write(model / "9")
    assert main(["convert", "--report", str(model / "9"), "--markdown", str(again), "--html", str(page)]) == 0
    assert "<title>Conversion of m</title>" in page.read_text()
    replace(WRITTEN, source=replace(WRITTEN.source, revision="older")).write(model / "9")
    assert main(["convert", "--report", str(model / "9"), "--markdown", str(again)]) == 0
    assert "- revision: older" in again.read_text()


@pytest.mark.extras
def test_page_is_made_again_without_texts_that_were_taken_out(model: Path) -> None:
    path = model / "10" / "conch.json"
    written = json.loads(path.read_text())
    contrasts = {"measure": "1 − cosine", "differences": [0.1], "worst": []}
    contrasts["worst"] = [{"text": "My secret", "reference": "a", "variant": "b", "difference": 0.1, "cosine": 0.9}]
    page = model.parent / "again.html"

    for found, shown in ((contrasts, True), (None, False)):
        written["variants"][1]["contrasts"] = found
        path.write_text(json.dumps(written))
        assert main(["convert", "--report", str(model), "--html", str(page)]) == 0
        assert ("My secret" in page.read_text()) is shown


def test_folder_without_a_manifest_is_no_converted_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "1").mkdir()

    assert main(["convert", "--report", str(tmp_path)]) == 1

    assert "is not a converted model: neither it nor a version in it has a conch.json" in capsys.readouterr().err


def test_report_converts_nothing(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "--report", str(model), "-m", "m", "--quantize", "int8"]) == 1
    assert "--report converts nothing, so it cannot be used with --model, --quantize." in capsys.readouterr().err
    assert main(["convert"]) == 1
    assert "Missing option '-m' / '--model'" in capsys.readouterr().err
