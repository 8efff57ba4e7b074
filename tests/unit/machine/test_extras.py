"""Optional packages: the table, what is missing, old or broken, and the command that helps where conch is installed."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from conch import __version__
from conch.core.errors import Code, ConchError
from conch.machine import extras

ROOT = Path(__file__).parents[3]
#: The package of a statement of import, one of which ruff allows on a line; parsing all files would take seconds.
IMPORT = re.compile(r"^ *(?:from (\w+)[\w.]* import |import (\w+)[\w.]*(?: as \w+)?(?: *#.*)?$)", re.MULTILINE)
FROM_INDEX = f'pip install "conch-server[lora]=={__version__}"'


def error(*modules: str, purpose: str = "engine 'any'", **given: Any) -> str:
    with pytest.raises(ConchError) as raised:
        extras.require(purpose, *modules, **given)
    assert raised.value.code is Code.UNSUPPORTED
    return raised.value.message


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(extras, "pip_install", lambda: "pip install")


@pytest.fixture
def installed_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that conch was installed from."""
    wheel = tmp_path / "conch.whl"
    wheel.touch()
    install(monkeypatch, tmp_path, json.dumps({"archive_info": {}, "url": wheel.as_uri()}))
    return wheel


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, origin: str | None) -> None:
    """Let conch be an installed copy, for which pip recorded ``origin``."""

    class Installed:
        def read_text(self, name: str) -> str | None:
            return origin

    monkeypatch.setattr(extras, "__file__", str(folder / "lib/site-packages/conch/machine/extras.py"))
    monkeypatch.setattr(metadata, "distribution", lambda name: Installed())
    monkeypatch.setattr(extras, "installed_version", lambda name: __version__)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a module, installed in a version if one is given."""

    def write(module: str, source: str, name: str = "", version: str = "") -> None:
        (tmp_path / f"{module}.py").write_text(source)
        if version:
            information = tmp_path / f"{name}-{version}.dist-info"
            information.mkdir()
            (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        # Put back afterwards, and first there, so that one which was not imported yet is taken away again.
        monkeypatch.setitem(sys.modules, module, None)
        del sys.modules[module]
        extras.installed_version.cache_clear()

    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    extras.installed_version.cache_clear()


def declared() -> dict[str, dict[str, str]]:
    """The packages of each extra with their oldest version, without conch's own and those for its development."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, dict[str, str]] = {}
    for extra, requirements in project["optional-dependencies"].items():
        matches = [
            re.fullmatch(r"((?!conch)[\w-]+(?:\[\w+\])?)(?:>=([\d.]+))?", requirement) for requirement in requirements
        ]
        found[extra] = {match[1]: match[2] or "" for match in matches if match}
    return {extra: packages for extra, packages in found.items() if extra not in ("dev", "demo")}


def test_table_is_that_of_pyproject() -> None:
    table: dict[str, dict[str, str]] = {extra: {} for extra in declared()}
    for one in extras.PACKAGES.values():
        for extra in one.extras:
            table[extra][one.name] = one.oldest

    assert table == declared()


def test_name_for_pip_is_that_of_pyproject() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"] == extras.DISTRIBUTION


def test_extras_that_bring_others_are_those_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (own,) = [one for one in project["optional-dependencies"]["convert"] if one.startswith("conch-server[")]

    assert extras.INCLUDED["convert"] == tuple(own.removeprefix("conch-server[").removesuffix("]").split(","))


def test_every_optional_package_that_sources_import_is_in_the_table() -> None:
    given = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    core = {re.split(r"[^\w-]", one)[0].replace("-", "_") for one in given} | {"google", "grpc", "grpc_health", "conch"}
    #: In Python models; what a model brings or not; which loads the plugin itself.
    others = {"triton_python_backend_utils", "pandas", "ml_dtypes", "pytest"}
    imported = set()
    for path in (ROOT / "src/conch").rglob("*.py"):
        if "demo/repository" not in path.as_posix():
            imported |= {one or other for one, other in IMPORT.findall(path.read_text("utf-8"))}

    assert imported - core - others - sys.stdlib_module_names <= extras.PACKAGES.keys()
    assert {"torch", "openvino", "peft"} <= {*imported, *extras.PACKAGES}


def test_missing_packages_are_named_together_with_one_command(checkout: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torch", "onnxruntime", "nncf", "soundfile"):
        monkeypatch.setitem(sys.modules, module, None)

    command = 'pip install -c constraints.txt -e ".[huggingface,audio]"'
    assert error("torch", "json", "soundfile") == f"engine 'any' needs torch and soundfile: {command}"
    # The extra of one of them brings the others.
    assert error("torch", "onnxruntime", "nncf") == (
        "engine 'any' needs torch, onnxruntime and nncf: pip install -c constraints.txt -e \".[convert]\""
    )
    # A package is named once, however many of its modules are missing.
    monkeypatch.setitem(sys.modules, "ray", None)
    assert error("ray", "ray") == "engine 'any' needs ray[serve]: pip install -c constraints.txt -e \".[ray]\""


def test_extra_of_the_engine_is_named_where_several_bring_a_package(
    checkout: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)

    assert error("tokenizers").endswith('".[huggingface]"')
    assert error("tokenizers", extra="openvino").endswith('".[openvino]"')


def test_package_that_is_too_old_is_named_with_both_versions(checkout: None, package: Any) -> None:
    package("nncf", "", "nncf", "2.9.1+cpu")

    assert error("nncf") == (
        "engine 'any' needs nncf 2.15 or newer (installed is 2.9.1+cpu): "
        'pip install -c constraints.txt -e ".[convert]"'
    )


def test_package_that_cannot_be_imported_is_not_called_missing(checkout: None, package: Any) -> None:
    package("soundfile", "raise OSError('libsndfile.so: cannot open shared object file')", "soundfile", "0.13")

    assert error("soundfile") == (
        "engine 'any' needs soundfile: soundfile 0.13 is installed, but cannot be imported: OSError: libsndfile.so: "
        "cannot open shared object file; reinstall it: pip install --force-reinstall --no-deps soundfile"
    )


def test_missing_package_of_a_package_is_the_one_that_is_named(checkout: None, package: Any) -> None:
    package("soundfile", "import surely_not_installed.part", "soundfile", "0.13")

    assert error("soundfile") == (
        "engine 'any' needs soundfile: soundfile 0.13 is installed, but surely_not_installed, which it imports, is "
        "not: pip install surely_not_installed"
    )


def test_part_of_a_package_is_missing_where_its_libraries_are(
    checkout: None, package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ("try: import surely_not_installed", "except ImportError as e: raise RuntimeError('no http') from e")
    package("partial", "\n".join(lines), "partial", "1.0")
    monkeypatch.setitem(extras.PACKAGES, "partial", extras.Package("partial[http]"))

    assert error("partial") == "engine 'any' needs partial[http]: pip install \"partial[http]\""


def test_package_that_is_there_is_returned_in_any_version(package: Any) -> None:
    package("nncf", "answer = 42", "nncf", "3.1")
    assert extras.load("engine 'any'", "nncf").answer == 42
    # What another distribution brings (onnxruntime-gpu) has no version by this name.
    package("soundfile", "answer = 43")
    assert extras.load("engine 'any'", "soundfile").answer == 43


def test_import_error_of_a_library_gives_the_command(checkout: None) -> None:
    error = extras.lacks_library("task 't'", ModuleNotFoundError("No module named 'timm'", name="timm"))
    assert error.message == "task 't' needs a library: pip install timm"
    assert error.public == "task 't' needs a library: timm"
    error = extras.lacks_library("task 't'", ModuleNotFoundError("No module named 'PIL.Image'", name="PIL.Image"))
    assert error.message == "task 't' needs a library: pip install -c constraints.txt -e \".[image]\""
    assert error.public == "task 't' needs a library: pillow"
    error = extras.lacks_library("task 't'", ImportError("it needs a newer glibc. Sorry"))
    assert error.message == error.public == "task 't' needs a library: it needs a newer glibc"
    assert extras.command_for("tritonclient.http") == 'pip install "tritonclient[http]"'


def test_command_in_a_checkout_names_its_folder_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkout: None
) -> None:
    assert extras.command("lora") == 'pip install -c constraints.txt -e ".[lora]"'
    monkeypatch.chdir(tmp_path)
    assert extras.command("lora") == f'pip install -c {ROOT}/constraints.txt -e "{ROOT}[lora]"'


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ('{{"dir_info": {{}}, "url": "file://{0}"}}', 'pip install "{0}[lora]"'),
        ('{{"dir_info": {{}}, "url": "file://{0}/gone"}}', FROM_INDEX),
        ('{{"archive_info": {{}}, "url": "file://{0}/conch.whl"}}', 'pip install "{0}/conch.whl[lora]"'),
        ('{{"archive_info": {{}}, "url": "file://{0}/gone.whl"}}', FROM_INDEX),
        ('{{"archive_info": {{}}, "url": "https://host/conch.whl"}}', FROM_INDEX),
        (None, FROM_INDEX),
    ],
)
def test_command_of_an_installed_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: str | None, expected: str
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "pyproject.toml").touch()
    (source / "conch.whl").touch()

    install(monkeypatch, tmp_path, origin and origin.format(source))
    monkeypatch.setattr(extras, "pip_install", lambda: "pip install")

    assert extras.command("lora") == expected.format(source)


def test_packages_are_named_in_an_environment_without_conch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the worker's of a model that brings its own: PyPI's package called conch is another one."""
    monkeypatch.setattr(extras, "installed_version", lambda name: "")
    monkeypatch.setattr(extras, "pip_install", lambda: "pip install")
    assert extras.command("lora", "audio") == 'pip install "peft>=0.18" scipy soundfile'
    assert extras.command("report") == 'pip install "altair>=5.5" "vl-convert-python>=1.7"'


def test_pip_of_another_environment_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = tmp_path / ".venv/bin", tmp_path / "usr/bin"
    for folder in (own, other):
        folder.mkdir(parents=True)
        (folder / "pip").touch(0o755)
    monkeypatch.setattr(sys, "executable", str(own / "python"))

    monkeypatch.setenv("PATH", f"{own}:{other}")
    assert extras.pip_install() == "pip install"
    monkeypatch.setenv("PATH", f"{other}:{own}")
    assert extras.pip_install() == f"{own}/pip install"
    monkeypatch.chdir(tmp_path)
    assert extras.pip_install() == ".venv/bin/pip install"
    (own / "pip").unlink()
    assert extras.pip_install() == ".venv/bin/python -m pip install"


def test_tools_that_install_programs_have_their_own_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed_wheel: Path
) -> None:
    home = tmp_path / "archive-v0/k3"
    monkeypatch.setattr(sys, "executable", str(home / "bin/python"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "tools/conch-server"))
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    assert extras.command("lora") == f'uv pip install --python {home}/bin/python "{installed_wheel}[lora]"'

    monkeypatch.setattr(sys, "prefix", str(home))  # of uvx
    assert extras.command("lora") == f'uv tool install "{installed_wheel}[lora]"'

    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / "pipx_metadata.json").touch()
    assert extras.command("lora") == f'pipx runpip conch-server install "{installed_wheel}[lora]"'
