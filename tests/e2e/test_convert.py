"""``conch convert`` and what it writes, served: by conch, and as far as its backends go by NVIDIA's server."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conch.cli import main
from tests.events import eventually
from tests.oracle import OracleUnavailable, TritonServer, install, perf_analyzer
from tests.servers import CONCH, ConchServer
from tests.text_checkpoints import TEXTS, write

SHORT = ["-p", "500", "-s", "100000", "-r", "5"]
#: As the walkthrough has them; the walkthrough's own model is four times as wide.
EASY = ["--input-data", "zero", "-m", "sts_onnx_model", "--shape", "input_ids:8,64", "--shape", "attention_mask:8,64"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("checkpoint"), "AutoModelForSequenceClassification", num_labels=2)


@pytest.fixture(scope="module")
def repository(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both layouts of one checkpoint."""
    target = tmp_path_factory.mktemp("models")
    quick = [
        *("-m", str(checkpoint), "-o", str(target), "--name", "sts", "--batch-size", "1", "--seconds", "0"),
        *("--quantize", "none"),
    ]
    command = [
        str(CONCH),
        "convert",
        *quick,
        "--backend",
        "onnx",
        "pytorch",
        "--seq-len",
        "16",
        "32",
        "32",
        "--verbose",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    # In this process, which has imported torch.
    assert main(["convert", *quick, "--backend", "onnx", "--seq-len", "16", "--layout", "triton"]) == 0
    return target


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConchServer]:
    with ConchServer(repository, log=tmp_path_factory.mktemp("logs") / "conch.log") as server:
        yield server


def infer(address: str, model: str, name: str, shape: list[int], texts: list[str], *outputs: str) -> dict[str, Any]:
    """The answer's tensors by name."""
    body: dict[str, Any] = {"inputs": [{"name": name, "datatype": "BYTES", "shape": shape, "data": texts}]}
    if outputs:
        body["outputs"] = [{"name": output} for output in outputs]
    request = urllib.request.Request(f"http://{address}/v2/models/{model}/infer", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as page:
        return {one["name"]: np.reshape(one["data"], one["shape"]) for one in json.load(page)["outputs"]}


def expected(checkpoint: Path, texts: list[str]) -> np.ndarray[Any, Any]:
    """The logits that transformers itself gives."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(checkpoint)(texts, padding=True, truncation=True, return_tensors="pt")
    with torch.inference_mode():
        logits: np.ndarray[Any, Any] = AutoModelForSequenceClassification.from_pretrained(checkpoint)(**tokens).logits
        return np.asarray(logits)


def test_both_layouts_answer_like_transformers(server: ConchServer, checkpoint: Path) -> None:
    texts = list(TEXTS)
    wanted = expected(checkpoint, texts)

    one = infer(server.http, "sts", "text_input", [len(texts), 1], texts, "logits")["logits"]
    trio = infer(server.http, "sts_onnx_inference", "TEXT", [len(texts)], texts)["output"]

    np.testing.assert_allclose(one, wanted, atol=1e-3)
    np.testing.assert_allclose(trio, wanted, atol=1e-3)


@pytest.mark.parametrize(
    "arguments",
    [
        [
            *("-m", "sts_onnx_inference", "--percentile=95", "--shape", "TEXT:1", "-i", "grpc", "-a"),
            *("--string-data", "This live event is great. I will sign-up for Infinity."),
        ],
        [*EASY, "--concurrency-range", "1:2", "-i", "grpc", "-a"],
        [*EASY],
    ],
)
def test_perf_analyzer_runs_as_in_the_walkthrough(arguments: list[str], server: ConchServer) -> None:
    address = server.grpc if "grpc" in arguments else server.http
    try:
        done = perf_analyzer(*arguments, *SHORT, "-u", address, timeout=90)
    except OracleUnavailable as error:
        pytest.skip(f"perf_analyzer is not available here: {error}")
    output = done.stdout + done.stderr
    assert "Throughput:" in output, output
    assert "error" not in done.stderr.lower().replace("failed to obtain stable measurement", ""), output


@pytest.mark.parametrize(("model", "asks"), [("sts_onnx_inference", False), ("sts", True)])
def test_curl_sends_the_body_that_conch_request_writes(
    model: str, asks: bool, server: ConchServer, repository: Path, tmp_path: Path
) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    where = ["--url", f"http://{server.http}"] if asks else ["-r", str(repository)]
    file = tmp_path / "query_body.bin"

    written = subprocess.run(
        [str(CONCH), "request", model, "Grüße from the station", *where, "-o", str(file)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    line = written.stdout.replace("\\\n", " ").replace("localhost:8000", server.http)
    done = subprocess.run(shlex.split(line), capture_output=True, text=True, timeout=60, check=True)

    assert json.loads(done.stdout)["outputs"], done.stdout


def test_conversion_killed_in_the_middle_leaves_nothing_to_load(checkpoint: Path, tmp_path: Path) -> None:
    command = [str(CONCH), "convert", "-m", str(checkpoint), "-o", str(tmp_path), "--name", "m", "--backend", "onnx"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: any(tmp_path.glob(".*/built/*")), "something is built", timeout=150)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()

    assert all(path.name.startswith(".") for path in tmp_path.iterdir())
    with ConchServer(tmp_path) as server:
        request = urllib.request.Request(f"http://{server.http}/v2/repository/index", b"{}")
        with urllib.request.urlopen(request, timeout=60) as page:
            assert json.load(page) == []


@pytest.fixture(scope="session")
def python_with_tokenizers() -> Path:
    """An interpreter for the oracle's Python models: numpy before 2, and the library of the tokenizer."""
    try:
        home = install().home / "tokenizers"
    except OracleUnavailable as error:
        pytest.skip(f"the real Triton is not available here: {error}")
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "numpy<2", "tokenizers"]
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"tokenizers cannot be installed here: {done.stderr.strip()}")
        (home / "ready").touch()
    return python


@pytest.mark.slow
@pytest.mark.oracle
def test_tokenizer_of_the_trio_runs_on_triton(
    server: ConchServer, repository: Path, tmp_path: Path, python_with_tokenizers: Path
) -> None:
    """The oracle has no onnxruntime backend, so the other two stay behind."""
    shutil.copytree(repository / "sts_onnx_tokenize", tmp_path / "sts_onnx_tokenize")
    texts = list(TEXTS)

    with TritonServer(tmp_path, python=python_with_tokenizers) as triton:
        theirs = infer(triton.http, "sts_onnx_tokenize", "TEXT", [len(texts)], texts)
    ours = infer(server.http, "sts_onnx_tokenize", "TEXT", [len(texts)], texts)

    assert theirs.keys() == ours.keys() >= {"input_ids", "attention_mask"}
    for name, array in ours.items():
        np.testing.assert_array_equal(theirs[name], array)


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("openvino")
    from transformers import LlamaConfig

    from tests.convert_checkpoints import causal

    return causal(tmp_path_factory.mktemp("llama"), LlamaConfig, num_key_value_heads=2)


def test_converted_language_model_writes_what_the_checkpoint_writes(
    language_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quick = ["--batch-size", "1", "--seq-len", "16", "--seconds", "0", "--quantize", "int8"]
    assert main(["convert", "-m", str(language_model), "-o", str(tmp_path / "models"), "--name", "m", *quick]) == 0
    output = capsys.readouterr()
    assert "next token" in output.out and "openvino-int8" in output.err
    with (tmp_path / "models" / "m" / "config.pbtxt").open("a") as config:
        config.write('parameters { key: "variant" value { string_value: "openvino-fp32" } }\n')
    prompt = "The ferry leaves the northern"

    with ConchServer(tmp_path / "models", log=tmp_path / "conch.log") as server:
        body = {"text_input": prompt, "max_tokens": 12, "temperature": 0, "exclude_input_in_output": True}
        request = urllib.request.Request(f"http://{server.http}/v2/models/m/generate", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as page:
            text = json.load(page)["text_output"]

    tokenizer = AutoTokenizer.from_pretrained(language_model)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    written = AutoModelForCausalLM.from_pretrained(language_model).generate(ids, max_new_tokens=12, do_sample=False)
    assert text == tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
