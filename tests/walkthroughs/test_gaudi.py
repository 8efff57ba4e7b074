"""The walkthrough "Triton Inference Server with Gaudi", with a CPU in place of the accelerator."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.servers import ConchServer
from tests.walkthroughs.client import PROMPT
from tests.walkthroughs.conftest import Expected, copy_models, curl

# Each worker imports transformers for itself; tests/examples has models that do the same.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Iterator[ConchServer]:
    folder = tmp_path_factory.mktemp("gaudi")
    env = {**environment, "PRIVATE_REPO_TOKEN": "hf_only_looks_like_one"}
    with ConchServer(copy_models(folder / "models", "qwen2", "llama2"), log=folder / "log", env=env) as server:
        yield server


def test_the_server_is_ready(server: ConchServer) -> None:
    _, log = curl(server, "curl -v localhost:8000/v2/health/ready")
    received = [line.removeprefix("< ").strip() for line in log.splitlines() if line.startswith("< ")]
    assert received[0] == "HTTP/1.1 200 OK"
    assert {"Content-Length: 0", "Content-Type: text/plain"} <= set(received)


def test_the_log_has_the_table_of_models(server: ConchServer) -> None:
    assert server.log is not None
    rows = [[cell.strip() for cell in line.split("|")] for line in server.log.read_text().splitlines() if "|" in line]
    for row in ["Model", "Version", "Status"], ["llama2", "1", "READY"], ["qwen2", "1", "READY"]:
        assert ["", *row, ""] in rows


@pytest.mark.parametrize("models", ["qwen2", "qwen2,llama2"])
def test_the_client_asks_every_model(server: ConchServer, expected: Expected, models: str) -> None:
    command = [sys.executable, "-m", "tests.walkthroughs.client", "--model_name", models, "--url", server.http]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    names = {"qwen2": "Qwen/Qwen2-1.5B-Instruct", "llama2": "huggyllama/llama-7b"}
    for model in models.split(","):
        text = expected(names[model], PROMPT, "bfloat16", max_new_tokens=40)
        start = lines.index(f"----- Processing: model {model} -----")
        assert lines[start + 1] == f"-----Stats: model {model} -----"
        assert lines[start + 3] == f"Output: {[text.encode()]}"
