"""Oracle's walkthrough of Falcon with in-flight batching, on conch: the same repository, variables and request."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.conformance.raw import post
from tests.deploy.clouds import deploy, entry_point, started
from tests.models import build
from tests.oracle.run import free_ports

pytest.importorskip("torch")
pytest.importorskip("transformers")

MOUNT = "/opt/ds/model/deployed_model"
#: Where the walkthrough's configurations name the tokenizer, in the folder that the archive has.
CHECKPOINT = f"{MOUNT}/model_repository/tensorrt_llm/1/falcon-7b"
VALUES = {
    "triton_max_batch_size": "8", "decoupled_mode": "false", "max_queue_delay_microseconds": "0", "max_queue_size": "0",
    "logits_datatype": "TYPE_FP32", "preprocessing_instance_count": "1", "postprocessing_instance_count": "1",
    "max_beam_width": "1", "batching_strategy": "inflight_fused_batching", "tokenizer_dir": CHECKPOINT,
    "engine_dir": CHECKPOINT,
}  # fmt: skip
REQUEST = {
    "text_input": "What is the height of Eiffel Tower?", "max_tokens": 30, "bad_words": [""], "stop_words": [""],
    "top_k": 10, "top_p": 1, "end_id": 3, "pad_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig

    from tests.checkpoints import train_tokenizer, write_checkpoint

    names = ("ensemble", "preprocessing", "postprocessing", "tensorrt_llm")
    repository = build(tmp_path_factory.mktemp("falcon") / "models", *names, group="inflight_batcher/current")
    for config in repository.glob("*/config.pbtxt"):
        text = config.read_text()
        for name, value in VALUES.items():
            text = text.replace(f"${{{name}}}", value)
        config.write_text(text)
    checkpoint = repository / "tensorrt_llm" / "1" / "falcon-7b"
    checkpoint.mkdir()
    write_checkpoint(checkpoint, LlamaConfig, {"intermediate_size": 64}, train_tokenizer(), seed=3)
    return repository


def test_the_walkthroughs_request_is_answered(models: Path, tmp_path: Path) -> None:
    written = deploy("oci", models, tmp_path / "out", "--endpoint=generate")
    mounted = tmp_path / "deployed_model"
    with zipfile.ZipFile(written / "artifact.zip") as archive:
        archive.extractall(mounted)
    for config in mounted.rglob("config.pbtxt"):
        config.write_text(config.read_text().replace(MOUNT, str(mounted)))  # there is no such folder here
    steps = (written / "README.md").read_text()
    assert "--build-arg EXTRAS=huggingface,structured " in steps
    path = "/v2/models/ensemble/generate"
    assert f"MODEL_DEPLOY_PREDICT_ENDPOINT={path} " in steps
    (port,) = free_ports(1)
    command = [
        *entry_point(), f"--model-repository={mounted}/model_repository", "--allow-oci=true", f"--oci-port={port}",
        "--allow-http=false", "--allow-grpc=false", "--metrics-port=0",
    ]  # fmt: skip
    variables = {"MODEL_DEPLOY_PREDICT_ENDPOINT": path}
    with started(command, {}, variables, (f"127.0.0.1:{port}", "/health"), tmp_path / "log") as address:
        answers = [post(address, asked, REQUEST) for asked in (path, "/predict")]
    assert [answer.status for answer in answers] == [200, 200], answers
    assert all(answer.json()["model_name"] == "ensemble" and answer.json()["text_output"] for answer in answers)
