"""The images that variants are compared on: drawn ones, or those of a file."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from conch.convert.encoder.pictures import SIDE, image_search
from conch.convert.evidence import MIN_SAMPLES
from conch.core.errors import ConchError
from tests.task_checkpoints import image_file


def test_drawn_images_are_readable_and_those_for_calibration_are_not_compared() -> None:
    fitted, compared = image_search()
    assert not fitted.files.keys() & compared.files.keys()
    assert not set(fitted.texts.queries) & set(compared.texts.queries)
    assert len(compared.files) >= MIN_SAMPLES <= len(compared.texts.queries)
    assert len(set(compared.files.values())) == len(compared.files)
    for name, content in compared.files.items():
        assert name in compared.texts.passages
        assert Image.open(BytesIO(content)).size == (SIDE, SIDE)
    assert image_search()[1].files == compared.files


def test_images_of_a_file_lie_beside_it(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for index in range(3):
        (tmp_path / "photos" / f"{index}.png").write_bytes(image_file(seed=index))
    data = tmp_path / "data.jsonl"
    rows = ['{"image": "photos/0.png", "text": "a bus"}', '{"image": "photos/1.png"}', '{"image": "photos/2.png"}']
    data.write_text("\n".join(rows))
    fitted, compared = image_search(data)
    assert fitted == compared  # too few to divide
    assert compared.texts.queries == ("a bus",)
    assert compared.files["photos/2.png"] == image_file(seed=2)


@pytest.mark.parametrize(
    ("content", "refusal"),
    [
        ("text\na bus\n", "a model for images needs the column 'image', which row 1 lacks"),
        ("image\nmissing.png\n", "missing.png cannot be read: No such file or directory"),
    ],
)
def test_a_file_without_its_images_is_refused(tmp_path: Path, content: str, refusal: str) -> None:
    (tmp_path / "data.csv").write_text(content)
    with pytest.raises(ConchError, match=refusal):
        image_search(tmp_path / "data.csv")
