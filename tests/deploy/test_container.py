"""The container file: its steps, taken in a fresh folder, give a server that another user runs and cannot write to."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dockerfile_parse import DockerfileParser

from tests import onnx_graphs
from tests.conformance.raw import post, tensor
from tests.deploy.processes import READING, USER, become
from tests.deploy.registry import ROOT
from tests.models import build
from tests.oracle.run import free_ports, wait_until_ready

FILE = ROOT / "deploy/container/Containerfile"


@pytest.fixture(scope="module")
def stages() -> list[list[dict[str, Any]]]:
    """The instructions of each stage, without comments."""
    parser = DockerfileParser(fileobj=io.BytesIO(FILE.read_bytes()))
    found: list[list[dict[str, Any]]] = []
    for one in parser.structure:
        if one["instruction"] == "FROM":
            found.append([])
        if found and one["instruction"] != "COMMENT":
            found[-1].append(one)
    return found


def values(stage: list[dict[str, Any]], instruction: str) -> list[str]:
    return [one["value"] for one in stage if one["instruction"] == instruction]


def words(value: str) -> list[str]:
    """The words of an instruction in its list form."""
    return [str(word) for word in json.loads(value)]


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A folder that every user may enter."""
    folder = Path(tempfile.mkdtemp(prefix="conch-image-"))
    folder.chmod(0o755)
    yield folder
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def installed(home: Path, stages: list[list[dict[str, Any]]]) -> Path:
    """``/opt/conch`` of the image, without extras, read-only."""
    work = home / "build"
    (work / "dist").mkdir(parents=True)
    for file in ("constraints.txt", "deploy/container/slim.py"):
        shutil.copy(ROOT / file, work)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(work), str(ROOT)], check=True)
    target = home / "opt"
    for step in values(stages[0], "RUN"):
        line = step.replace("/opt/conch", str(target)).replace("python -m", f"{sys.executable} -m", 1)
        line = line.replace("python slim.py", f"{sys.executable} slim.py")
        subprocess.run(["sh", "-ec", line], cwd=work, check=True, env={**os.environ, "EXTRAS": "", "SLIM": "1"})
    for path in [target, *target.rglob("*")]:
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    return target


def test_the_image_is_slim_and_has_neither_pip_nor_rights(stages: list[list[dict[str, Any]]]) -> None:
    final = stages[-1]
    assert re.fullmatch(r"python:\S+-slim", values(final, "FROM")[0])
    assert "pip uninstall" in values(final, "RUN")[-1]
    debian = [command for stage in stages for command in values(stage, "RUN") if "apt-get" in command]
    assert all(command.startswith('case ",${EXTRAS}," in *,llamacpp,*)') for command in debian)
    assert values(final, "USER") == ["65532:65532"]
    order = [one["instruction"] for one in final]
    assert order.index("RUN") < order.index("USER") < order.index("ENTRYPOINT")
    assert [one for one in final if one["instruction"] in ("ADD", "VOLUME")] == []
    assert values(final, "COPY") == ["--from=build /opt/conch /opt/conch"]


def test_slim_variant_computes_graphs_without_what_it_removes(tmp_path: Path) -> None:
    origin = Path(str(importlib.metadata.distribution("openvino").locate_file("openvino")))
    shutil.copytree(origin, tmp_path / "openvino", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, FILE.with_name("slim.py"), tmp_path], check=True)
    assert sum(map(size, tmp_path.rglob("*"))) < 0.7 * sum(map(size, origin.rglob("*")))

    onnx_graphs.add_sub(tmp_path / "graph.onnx", shape=(1, 4))
    program = """if True:
        import numpy, openvino
        core = openvino.Core()
        assert openvino.__file__.startswith("{0}") and core.available_devices == ["CPU"]
        openvino.save_model(core.read_model("{0}/graph.onnx"), "{0}/graph.xml")
        ones = numpy.ones((1, 4), "float32")
        print(*core.compile_model("{0}/graph.xml", "CPU")([ones, ones])["sum"].ravel())
    """
    command = [sys.executable, "-c", program.format(tmp_path)]
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert (ended.stdout, ended.returncode) == ("2.0 2.0 2.0 2.0\n", 0), ended.stderr


def size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


@pytest.mark.slow
def test_nothing_of_pip_is_installed(installed: Path) -> None:
    assert (installed / "bin/conch").exists()
    assert not list(installed.glob("bin/pip*")) and not list(installed.glob("lib/*/site-packages/pip"))


@pytest.mark.slow
def test_another_user_serves_from_a_tree_that_is_read_only(
    home: Path, installed: Path, stages: list[list[dict[str, Any]]]
) -> None:
    final = stages[-1]
    places = {name: home / name for name in ("tmp", "cache")}
    for place in places.values():
        place.mkdir()
        os.chown(place, USER, USER if USER == 65532 else -1)
    models = build(home / "models", "add_sub")
    set_up = {}
    for pair in shlex.split(values(final, "ENV")[0]):
        name, _, value = pair.partition("=")
        set_up[name] = value.replace("${PATH}", "/usr/bin:/bin").replace("/opt/conch", str(installed))
    set_up |= {name: value.replace("/tmp", str(places["tmp"]), 1) for name, value in set_up.items() if value == "/tmp"}
    set_up |= {"HF_HOME": set_up["HF_HOME"].replace("/cache", str(places["cache"])), "TMPDIR": str(places["tmp"])}
    http, grpc, metrics = free_ports(3)
    (entry,), (command,) = values(final, "ENTRYPOINT"), values(final, "CMD")
    arguments = [word.replace("0.0.0.0", "127.0.0.1") for word in words(entry)[1:]]
    arguments += [word.replace("/models", str(models)) for word in words(command)]
    arguments += [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    before = snapshot(installed)
    user = as_user(installed)
    program = str(installed / "bin" / words(entry)[0])
    with (home / "log").open("wb") as log:
        server = subprocess.Popen([*user, program, *arguments], env=set_up, cwd="/", stdout=log, stderr=log)
    try:
        wait_until_ready(f"127.0.0.1:{http}", server)
        body = {"inputs": [tensor(name, "INT32", [1] * 16, [16]) for name in ("INPUT0", "INPUT1")]}
        assert post(f"127.0.0.1:{http}", "/v2/models/add_sub/infer", body).status == 200
        health = words(values(final, "HEALTHCHECK")[0].partition("CMD")[2].strip())
        health[-1] = health[-1].replace(":8000", f":{http}")
        assert subprocess.run([*user, *health], env=set_up).returncode == 0
    finally:
        server.terminate()
        assert server.wait(60) == 0, (home / "log").read_text()
    assert subprocess.run([*user, *health], env=set_up, stderr=subprocess.DEVNULL).returncode != 0
    assert snapshot(installed) == before


def as_user(installed: Path) -> list[str]:
    """What a command begins with to be run by the image's user."""
    if os.geteuid() != 0:
        return []
    plain = become()
    which = [*plain, str(installed / "bin/python"), "-c", "import sys; print(sys.version)"]
    found = subprocess.run(which, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    reaches = found.stdout.strip() == sys.version
    return plain if reaches else [*plain, *READING]


def snapshot(folder: Path) -> dict[str, tuple[int, float]]:
    return {str(path): (path.lstat().st_size, path.lstat().st_mtime) for path in folder.rglob("*")}
