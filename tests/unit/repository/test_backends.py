"""Which code runs a model: the server's own backend, or the model.py of a Python-based one."""

from __future__ import annotations

from pathlib import Path

import pytest

from conch.backends.table import BACKENDS
from conch.config.complete import complete
from conch.config.reading import Problem
from conch.config.schema import ModelConfig, implementation
from conch.repository import backends as places_module
from conch.repository.backends import BackendDirectories
from conch.repository.model_files import describe


@pytest.fixture
def backends(tmp_path: Path) -> Path:
    """A directory with the Python-based backends ``mine`` and ``vllm``, and Triton's own library of ``pytorch``."""
    folder = tmp_path / "backends"
    put(folder, "mine/model.py", "vllm/model.py", "onnxruntime/libtriton_onnxruntime.so", "onnxruntime/model.py")
    put(folder, "both/model.py", "both/libtriton_both.so", "empty/readme", "python/libtriton_python.so")
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    put(tmp_path / "m", "1/data.bin", "1/lib.so", "outside.so")
    return tmp_path / "m"


def put(folder: Path, *paths: str) -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()


def configured(text: str, places: BackendDirectories, model: Path) -> ModelConfig:
    (model / "config.pbtxt").write_text(text)
    files = describe("m", model, backends=places)
    return complete(files.config, "m", files.artefacts, gpus=[0], python_based=files.backend_directory is not None)


def problem(text: str, places: BackendDirectories, model: Path) -> Problem:
    with pytest.raises(Problem) as caught:
        places.check(configured(text, places, model), model, 1)
    return caught.value


@pytest.mark.parametrize("runtime", ["", 'runtime: "model.py"'])
def test_model_py_in_the_directory_runs_the_models_of_its_backend(backends: Path, model: Path, runtime: str) -> None:
    places = BackendDirectories(backends)
    assert places.python_based("mine") == backends / "mine"
    config = configured(f'backend: "mine" {runtime}', places, model)
    assert implementation(config) == "python"
    assert config.runtime == "model.py"  # as Triton shows it
    [group] = config.instance_group
    assert (group.kind, group.count) == (group.KIND_CPU, 1)  # as of any Python model
    places.check(config, model, 1)


def test_directory_overrides_the_servers_own_backends_except_python(backends: Path) -> None:
    places = BackendDirectories(backends)
    assert places.python_based("vllm") == backends / "vllm"
    put(backends, "python/model.py")
    assert places.python_based("python") is None
    assert places.python_based("python", "model.py") == backends / "python"


def test_usual_directory_of_triton_comes_after_the_servers_own_backends(
    backends: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places_module, "TRITONS_DIRECTORY", backends)
    places = BackendDirectories.beginning_with("")
    assert places.python_based("mine") == backends / "mine"
    assert places.python_based("vllm") is None
    assert places.python_based("vllm", "model.py") == backends / "vllm"
    assert BackendDirectories(backends.parent).python_based("mine") is None


def test_library_beside_model_py_goes_first_unless_the_runtime_says_otherwise(backends: Path, model: Path) -> None:
    places = BackendDirectories(backends)
    assert places.python_based("onnxruntime") is None  # Triton's own, which the server has too
    assert places.python_based("both") is None
    assert places.python_based("both", "model.py") == backends / "both"
    found = problem('backend: "both"', places, model)
    assert found.message.startswith(f"unable to load shared library: {backends}/both/libtriton_both.so: ")


@pytest.mark.parametrize("name", ["../backends/mine", "mine/../mine", "/", "..", ".", "", "mine\0", ".hidden"])
def test_name_that_leads_elsewhere_is_no_backend(backends: Path, name: str) -> None:
    put(backends, ".hidden/model.py", "model.py", "../model.py")
    assert BackendDirectories(backends).python_based(name) is None
    assert BackendDirectories(backends).python_based(str(backends / "mine"), "model.py") is None


def test_backends_that_are_found_are_listed_with_their_source(backends: Path) -> None:
    found = BackendDirectories(backends).found()
    assert {name for name, path in found.items() if path.startswith(str(backends))} == {"mine", "vllm"}
    assert BackendDirectories(backends / "nowhere").found().keys() == BackendDirectories().found().keys()


@pytest.mark.parametrize("backend", ["nowhere", "empty", "../backends/mine", ".."])
def test_backend_that_does_not_exist_is_refused_as_by_triton(backends: Path, model: Path, backend: str) -> None:
    found = problem(f'backend: "{backend}"', BackendDirectories(backends), model)
    assert found.message == (
        f"unable to find backend library for backend '{backend}', try specifying runtime on the model configuration."
    )


def test_python_based_backend_that_does_not_exist_is_refused_as_by_triton(backends: Path, model: Path) -> None:
    for backend, directory in [("nowhere", backends), ("python", backends), ("mine", None)]:
        found = problem(f'backend: "{backend}" runtime: "model.py"', BackendDirectories(directory), model)
        searched = directory or Path("/opt/tritonserver/backends")
        assert found.message == (
            "unable to find Python backend based backend library 'model.py' for model 'm', searched: "
            f"'{searched}/{backend}/model.py'"
        )


@pytest.mark.parametrize("library", ["other.py", "libtriton_mine.so", "../../x.so", "...", "/etc/passwd"])
def test_library_that_does_not_exist_is_refused_with_the_places_searched(
    backends: Path, model: Path, library: str
) -> None:
    found = problem(f'backend: "mine" runtime: "{library}"', BackendDirectories(backends), model)
    assert found.message == (
        f"unable to find backend library '{library}' for model 'm', searched: '{model}/1' '{model}' '{backends}/mine' "
    )


def test_library_outside_of_its_place_is_refused_as_by_triton(backends: Path, model: Path) -> None:
    found = problem('backend: "mine" runtime: "../outside.so"', BackendDirectories(backends), model)
    assert found.message == (
        f"backend library name '../outside.so' escapes backend directory '{model}/1', for model 'm', check model "
        "config runtime field"
    )


def test_library_that_comes_back_to_its_place_is_in_it(backends: Path, model: Path) -> None:
    found = problem('backend: "mine" runtime: "../1/lib.so"', BackendDirectories(backends), model)
    assert found.message.startswith(f"unable to load shared library: {model}/1/../1/lib.so: ")


def test_library_of_tritonserver_does_not_run_here(backends: Path, model: Path) -> None:
    found = problem('backend: "mine" runtime: "lib.so"', BackendDirectories(backends), model)
    assert found.message.startswith(f"unable to load shared library: {model}/1/lib.so: libraries of tritonserver do ")


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_library_that_triton_names_stands_for_the_servers_own_backend(model: Path, backend: str) -> None:
    places = BackendDirectories()
    config = configured(f'backend: "{backend}" runtime: "libtriton_{backend}.so"', places, model)
    places.check(config, model, 1)
    assert implementation(config) == backend


@pytest.mark.parametrize("backend", ["tensorrt", "tensorflow", "dali", "fil"])
def test_backends_of_triton_that_are_not_here_are_refused_with_the_way_out(model: Path, backend: str) -> None:
    found = problem(f'backend: "{backend}"', BackendDirectories(), model)
    assert found.message.startswith(f"unable to find backend library for backend '{backend}': ")
    assert "onnxruntime" in found.message or 'backend "python"' in found.message


def test_archive_beside_the_backends_source_is_its_environment(backends: Path, model: Path) -> None:
    (model / "config.pbtxt").write_text('backend: "mine"')
    assert describe("m", model, backends=BackendDirectories(backends)).backend_environment() == ""
    put(backends, "mine/pb_exec_env_model.py.tar.gz")
    files = describe("m", model, backends=BackendDirectories(backends))
    assert files.backend_environment() == f"{backends}/mine/pb_exec_env_model.py.tar.gz"
