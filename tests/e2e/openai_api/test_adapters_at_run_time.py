"""LoRA adapters that clients load and unload while the model serves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc

from tests.checkpoints import train_tokenizer, write_adapter, write_checkpoint
from tests.conformance.raw import Reply, Request, get, send
from tests.e2e.openai_api.asking import post
from tests.e2e.processes import workers
from tests.events import eventually
from tests.servers import ConchServer
from tests.unit.backends.engines.openvino.models import export

pytest.importorskip("peft")

COUNT = 8
PROMPT = "How can you be the river that is under the long bridge of the old town and how can you be here"


def write_config(folder: Path, **parameters: str) -> None:
    values = (
        f'parameters {{ key: "{key}" value {{ string_value: {json.dumps(value)} }} }}'
        for key, value in parameters.items()
    )
    (folder / "config.pbtxt").write_text(" ".join(('backend: "huggingface"', *values)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters ``0`` to ``7``; ``llama`` loads them at run time, ``fixed`` has them all from the start, by peft."""
    folder = tmp_path_factory.mktemp("adapters")
    versions = {name: folder / "models" / name / "1" for name in ("llama", "fixed")}
    write_checkpoint(versions["llama"], LlamaConfig, {"intermediate_size": 64}, train_tokenizer(), seed=1)
    for number in range(COUNT):
        write_adapter(versions["llama"], folder / "allowed" / str(number), number)
    shutil.copytree(versions["llama"], versions["fixed"])
    # The file is larger than its matrices: three of them fit.
    size = (folder / "allowed/0/adapter_model.safetensors").stat().st_size
    parameters = {
        "llama": {"lora_folders": json.dumps([str(folder / "allowed")]), "lora_cache_bytes": str(3 * size)},
        "fixed": {"lora_modules": json.dumps({f"f{n}": str(folder / "allowed" / str(n)) for n in range(COUNT)})},
    }
    for name, values in parameters.items():
        write_config(folder / "models" / name, engine="transformers", **values)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ConchServer]:
    options = ("--model-control-mode=explicit", "--load-model=*")
    with ConchServer(folder / "models", *options, log=folder / "log") as server:
        yield server


def server_post(server: ConchServer, path: str, body: Any) -> Reply:
    return send(server.http, Request("POST", path, body))


def load(server: ConchServer, name: str, path: str, **more: Any) -> tuple[int, Any]:
    return text_of(server, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **more})


def unload(server: ConchServer, name: str) -> tuple[int, Any]:
    return text_of(server, "/v1/unload_lora_adapter", {"lora_name": name})


def text_of(server: ConchServer, path: str, body: Any) -> tuple[int, Any]:
    """Post a body; returns the status, and the text or the error of the response."""
    reply = server_post(server, path, body)
    return reply.status, json.loads(reply.body)["error"] if reply.status != 200 else reply.body.decode()


def complete(server: ConchServer, model: str, **more: Any) -> Any:
    """Return the text of a greedy completion, or the status of an error."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **more}
    status, _, reply = post(server, "/v1/completions", body)
    return reply["choices"][0]["text"] if status == 200 else status


def listed(server: ConchServer) -> set[str]:
    models = get(server.http, "/v1/models").json()["data"]
    return {model["id"] for model in models if model.get("parent") == "llama"}


def test_more_adapters_than_fit_the_memory_are_those_of_peft(server: ConchServer) -> None:
    expected = {str(number): complete(server, f"f{number}") for number in range(COUNT)}
    base = complete(server, "fixed")
    assert len({base, *expected.values()}) == COUNT + 1
    stopped, wrong = threading.Event(), []

    def ask_base() -> None:
        while not stopped.is_set():
            if (text := complete(server, "llama")) != base:
                wrong.append(text)

    asking = threading.Thread(target=ask_base)
    asking.start()
    try:
        for name in expected:
            assert load(server, name, name) == (200, f"Success: LoRA adapter '{name}' added successfully.")
            assert complete(server, name) == expected[name]
        assert listed(server) == set(expected)
        for _ in range(2):  # those that have left the memory come back
            assert {name: complete(server, name) for name in expected} == expected
        texts: dict[str, Any] = {}
        asked = [
            threading.Thread(target=lambda name=name: texts.update({name: complete(server, name)})) for name in expected
        ]
        for thread in asked:
            thread.start()
        for thread in asked:
            thread.join()
        assert texts == expected
        for name in expected:
            assert unload(server, name) == (200, f"Success: LoRA adapter '{name}' removed successfully.")
            assert complete(server, name) == 404
    finally:
        stopped.set()
        asking.join()
    assert not wrong
    assert listed(server) == set()


def test_an_adapter_is_replaced_in_place(server: ConchServer) -> None:
    assert load(server, "red", "0")[0] == 200
    assert complete(server, "red") == complete(server, "f0")
    status, error = load(server, "red", "1")
    assert status == 400 and "has already been loaded" in error["message"]
    assert load(server, "red", "1", load_inplace=True, base_model_name="llama")[0] == 200
    assert complete(server, "red") == complete(server, "llama", lora_name="red") == complete(server, "f1")
    assert unload(server, "red")[0] == 200
    assert unload(server, "red")[0] == 404


def test_the_repository_api_loads_adapters(server: ConchServer) -> None:
    models = "/v2/repository/models/llama"
    parameters = {"lora_name": "green", "lora_path": "2"}
    assert server_post(server, f"{models}/load", {"parameters": parameters}).status == 200
    assert complete(server, "green") == complete(server, "f2")
    for wrong in ({"lora_name": "green"}, {**parameters, "config": "{}"}):
        assert server_post(server, f"{models}/load", {"parameters": wrong}).status == 400
    assert server_post(server, f"{models}/unload", {"parameters": {"lora_name": "green"}}).status == 200
    assert complete(server, "green") == 404
    assert complete(server, "llama") == complete(server, "fixed")


def test_grpc_loads_adapters(server: ConchServer) -> None:
    def load(**values: str) -> None:
        request = pb.RepositoryModelLoadRequest(model_name="llama")
        for name, value in values.items():
            request.parameters[name].string_param = value
        stub.RepositoryModelLoad(request, timeout=30)

    with grpc.insecure_channel(server.grpc) as channel:
        stub = pb_grpc.GRPCInferenceServiceStub(channel)
        load(lora_name="grey", lora_path="3")
        assert complete(server, "grey") == complete(server, "f3")
        load(lora_name="grey", lora_path="4")
        assert complete(server, "grey") == complete(server, "f4")
        for wrong in ({"lora_name": "grey"}, {"lora_name": "grey", "lora_path": ".."}):
            with pytest.raises(grpc.RpcError) as refused:
                load(**wrong)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        request = pb.RepositoryModelUnloadRequest(model_name="llama")
        request.parameters["lora_name"].string_param = "grey"
        stub.RepositoryModelUnload(request, timeout=30)
    assert complete(server, "grey") == 404
    assert complete(server, "llama") == complete(server, "fixed")


def test_an_openvino_graph_has_adapters(server: ConchServer, folder: Path) -> None:
    version = folder / "models/graph/1"
    version.mkdir(parents=True)
    export(LlamaForCausalLM.from_pretrained(folder / "models/llama/1").eval(), version)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(folder / "models/llama/1" / name, version / name)
    write_config(folder / "models/graph", engine="openvino", lora_folders=json.dumps([str(folder / "allowed")]))
    try:
        assert server_post(server, "/v2/repository/models/graph/load", {}).status == 200
        for name in ("0", "5"):
            assert load(server, f"g{name}", name, base_model_name="graph")[0] == 200
        assert complete(server, "graph") == complete(server, "fixed")
        assert [complete(server, "g0"), complete(server, "g5")] == [complete(server, "f0"), complete(server, "f5")]
        assert load(server, "g0", "6", base_model_name="graph", load_inplace=True)[0] == 200
        assert complete(server, "g0") == complete(server, "f6")
        assert unload(server, "g0")[0] == 200
        assert [complete(server, "g0"), complete(server, "g5")] == [404, complete(server, "f5")]
    finally:
        server_post(server, "/v2/repository/models/graph/unload", {})
        eventually(lambda: complete(server, "g5") == 404, "the unloading of the graph")


def test_adapters_that_cannot_be_loaded_disturb_nobody(server: ConchServer, folder: Path) -> None:
    allowed = folder / "allowed"
    (allowed / "broken").mkdir()
    (allowed / "broken/adapter_model.safetensors").write_bytes(b"nothing")
    (allowed / "broken/adapter_config.json").write_text('{"lora_alpha": 8}')
    (allowed / "empty").mkdir()
    write_checkpoint(
        folder / "wide", LlamaConfig, {"intermediate_size": 64, "hidden_size": 64}, train_tokenizer(), seed=0
    )
    write_adapter(folder / "wide", allowed / "wide", 0)
    write_adapter(folder / "models/llama/1", allowed / "high", 0, rank=257)
    shutil.copytree(allowed / "0", folder / "outside")
    (allowed / "linked").symlink_to(folder / "outside")
    assert load(server, "kept", "3")[0] == 200
    for path, message in {
        "broken": "is not a safetensors file",
        "empty": "has no adapter_model.safetensors",
        "wide": "have a different size",
        "high": "has rank 257; the parameter 'max_lora_rank' allows 256",
        "../outside": "is in none of the folders",
        str(folder / "outside"): "is in none of the folders",
        "linked": "is in none of the folders",
    }.items():
        status, error = load(server, "bad", path)
        assert status == 400 and message in error["message"], (path, error)
        assert path.startswith("/") or str(folder) not in error["message"]
        assert complete(server, "bad") == 404
    assert load(server, "llama", "0")[1]["param"] == "lora_name"
    for name in ("red\x00salt", "two\nlines", " ", "n" * 3000):
        for status, error in (load(server, name, "0"), unload(server, name)):
            assert (status, error["param"]) == (400, "lora_name"), (name, error)
            assert "must have 1 to 255 printable characters" in error["message"] and len(error["message"]) < 300
    assert load(server, "bad", "0", base_model_name="fixed")[1]["message"].startswith(
        "model 'fixed' does not load LoRA adapters at run time"
    )
    assert listed(server) == {"kept"}
    assert complete(server, "kept") == complete(server, "f3")
    assert complete(server, "llama") == complete(server, "fixed")
    assert unload(server, "kept")[0] == 200


def test_adapters_outlive_a_worker_and_not_a_reload(server: ConchServer) -> None:
    assert load(server, "red", "4")[0] == 200
    expected = complete(server, "f4")
    for worker in workers(server):
        os.kill(worker.pid, signal.SIGKILL)
    eventually(lambda: complete(server, "red") == expected, "the adapter after a restart", 60)
    assert server_post(server, "/v2/repository/models/llama/load", {}).status == 200
    assert complete(server, "red") == 404
    assert listed(server) == set()


@pytest.mark.slow
def test_adapter_for_models_with_the_same_name_is_refused(folder: Path) -> None:
    second = folder / "second"
    shutil.copytree(folder / "models/llama", second / "llama")
    options = ("--model-namespacing=true", f"--model-repository={second}", "--model-control-mode=explicit")
    with ConchServer(folder / "models", *options, "--load-model=llama", log=folder / "second.log") as server:
        for more in ({}, {"base_model_name": "llama"}):
            status, error = load(server, "red", "0", **more)
            assert status == 400 and "llama" in error["message"], error
