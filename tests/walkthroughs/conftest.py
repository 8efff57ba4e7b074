"""The walkthroughs' models, loading tiny checkpoints in place of the ones they download, and curl to ask them."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.servers import ConchServer

REPOSITORY = Path(__file__).with_name("repository")

#: What a model is expected to say: model id, prompt, and the limits that ``generate`` takes.
Expected = Callable[..., str]


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder of the Hugging Face Hub with everything that the models ask for."""
    from tests.checkpoints import hub_cache

    return hub_cache(tmp_path_factory.mktemp("hub"))


@pytest.fixture(scope="session")
def environment(hub: Path) -> dict[str, str]:
    """What the server adds to its environment, so that its models find their checkpoints there."""
    return {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="session")
def expected(hub: Path) -> Expected:
    """Ask transformers itself, in this process."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def generate(name: str, prompt: str, dtype: str, **limits: int) -> str:
        folder = next((hub / f"models--{name.replace('/', '--')}" / "snapshots").iterdir())
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        tokens = tokenizer(prompt, return_tensors="pt")
        return str(tokenizer.decode(model.generate(**tokens, **limits)[0], skip_special_tokens=True))

    return generate


def copy_models(target: Path, *names: str) -> Path:
    """A model repository with those models (``cp -r falcon7b/ model_repository/``)."""
    for name in names:
        shutil.copytree(REPOSITORY / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def curl(server: ConchServer, command: str) -> tuple[str, str]:
    """What a command line of a walkthrough prints (standard output, standard error), sent to ``server``."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    arguments = shlex.split(command.replace("localhost:8000", server.http))
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout, done.stderr
