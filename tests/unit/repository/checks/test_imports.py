"""Which imports of a source count, and where what they name is looked for."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from conch.repository.checks.missing_imports import interpreter_of, missing_modules, neighbour_source
from conch.repository.checks.python_model import Imported, changes_path, imports_of


def names(source: str) -> list[str]:
    return [one.name for one in imports_of(ast.parse(source))]


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    import lost\nexcept ImportError:\n    import lost2\n",
        "try:\n    import lost\nexcept (ValueError, ModuleNotFoundError):\n    pass\n",
        "try:\n    import lost\nexcept:\n    pass\n",
        "with contextlib.suppress(ImportError):\n    import lost\n",
        "if TYPE_CHECKING:\n    import lost\n",
        "if sys.version_info < (3, 9):\n    import lost\nelse:\n    import lost2\n",
    ],
)
def test_an_import_that_the_source_is_prepared_to_miss_does_not_count(source: str) -> None:
    assert names(source) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import a, b.c as d\nfrom e.f import g\n", ["a", "b.c", "e.f"]),
        ("try:\n    import a\nexcept ValueError:\n    pass\nfinally:\n    import b\n", ["a", "b"]),
        ("class M:\n    import a\n    async def execute(self):\n        with x:\n            import b\n", ["a", "b"]),
    ],
)
def test_every_other_import_counts(source: str, found: list[str]) -> None:
    assert names(source) == found


def test_an_import_in_a_function_that_may_not_be_called_is_not_certain() -> None:
    source = "import a\ndef plot():\n    import b\nclass M:\n    def initialize(self, args):\n        import c\n"
    assert imports_of(ast.parse(source)) == [
        Imported("a", 1), Imported("b", 3, certain=False), Imported("c", 6),
    ]  # fmt: skip


def test_a_source_that_changes_the_path_is_noticed() -> None:
    assert changes_path(ast.parse("import sys\nsys.path.insert(0, 'x')\n"))
    assert not changes_path(ast.parse("import os\nos.path.join('x')\n"))


def test_the_interpreter_is_asked_and_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bomb.py").write_text("raise SystemExit('it was run')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    asked = ["bomb", "json", "no_such_module", "triton_python_backend_utils"]
    assert missing_modules(sys.executable, asked) == {"no_such_module"}


def test_the_current_directory_is_none_of_a_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_me.py").touch()
    monkeypatch.chdir(tmp_path)
    assert missing_modules(sys.executable, ["beside_me"]) == {"beside_me"}


def test_an_interpreter_that_does_not_answer_is_not_a_finding(tmp_path: Path) -> None:
    assert missing_modules(str(tmp_path / "python"), ["no_such_module"]) == set()


def test_the_interpreter_is_that_of_the_models_environment(tmp_path: Path) -> None:
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert interpreter_of("", tmp_path) == sys.executable
    assert interpreter_of("$$TRITON_MODEL_DIRECTORY/env", tmp_path) == str(python)
    assert interpreter_of("$$TRITON_MODEL_DIRECTORY/env.tar.gz", tmp_path) is None


def test_neighbours_are_files_and_packages_of_both_directories(tmp_path: Path) -> None:
    version = tmp_path / "1"
    (version / "package").mkdir(parents=True)
    for path in (version / "package" / "__init__.py", version / "package" / "part.py", tmp_path / "shared.py"):
        path.touch()

    assert neighbour_source(Imported("package.part", 1), version) == version / "package" / "part.py"
    assert neighbour_source(Imported("package", 1), version) == version / "package" / "__init__.py"
    assert neighbour_source(Imported("shared", 1), version) == tmp_path / "shared.py"
    assert neighbour_source(Imported("shared", 1, level=1), version) is None
    assert neighbour_source(Imported("package.lost", 1), version) is None
