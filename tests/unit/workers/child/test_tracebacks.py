"""What a log line says of an exception: the model's frames, and its place."""

from __future__ import annotations

from pathlib import Path

from conch.workers.child.messages import log_frame


def failure_of(source: str, path: Path) -> BaseException:
    """What running ``source``, a model's file, raises."""
    path.write_text(source)
    try:
        exec(compile(source, str(path), "exec"), {"__name__": "1.model"})
    except Exception as error:
        assert error.__traceback__ is not None
        return error.with_traceback(error.__traceback__.tb_next)  # without this function
    raise AssertionError("it ran")


def test_file_that_cannot_be_read_is_the_place(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text("import os\ndef (:\n")
    try:
        compile(path.read_text(), str(path), "exec")
    except SyntaxError as error:
        error.__traceback__ = None  # as of an import: no frame but importlib's
        frame = log_frame(error)
    assert (frame["file"], frame["line"]) == ("model.py", 2)
    assert "Traceback" not in frame["message"]


def test_text_that_a_model_cannot_read_has_the_model_s_traceback(tmp_path: Path) -> None:
    frame = log_frame(failure_of("import ast\n\nast.literal_eval('1 +')\n", tmp_path / "model.py"), "it failed")
    assert (frame["file"], frame["line"]) == ("model.py", 3)
    assert frame["message"].startswith("it failed\nTraceback (most recent call last):\n")
    assert frame["message"].endswith("SyntaxError: invalid syntax")


def test_helper_that_cannot_be_read_is_the_place_with_the_way_to_it(tmp_path: Path) -> None:
    helper = tmp_path / "helper.py"
    helper.write_text("def (:\n")
    source = f"def load():\n    compile('def (:', {str(helper)!r}, 'exec')\nload()\n"
    frame = log_frame(failure_of(source, tmp_path / "model.py"))
    assert (frame["file"], frame["line"]) == ("helper.py", 1)
    assert "line 3, in <module>" in frame["message"]
