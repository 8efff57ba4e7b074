"""The clients of docs/clients.md, and what the last runs of their tests exercised (``clients.json``)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
#: Python environments of clients that do not share one with others.
OWN_ENVIRONMENTS: Final = HERE.parents[1] / ".venv-clients"
_RECORD: Final = HERE / "clients.json"
#: The features in the order of the table.
FEATURES: Final = (
    "chat", "completions", "responses", "messages", "streaming", "tools", "structured output", "embeddings", "rerank",
    "transcription", "token counts", "models", "errors",
)  # fmt: skip


class Features(tuple[str, ...]):
    """Features in the order of the table. Raises ValueError for unknown ones."""

    def __new__(cls, features: Iterable[str]) -> Features:
        return super().__new__(cls, sorted(features, key=FEATURES.index))


@dataclass(frozen=True, slots=True)
class Client:
    """``package`` is its name in PyPI or npm; ``setting`` is what directs it to a server.

    ``environment`` is the folder of its own Python environment, empty for that of the test.
    """

    language: str
    package: str
    setting: str
    environment: str = ""

    def version(self) -> str:
        if self.language == "Node":
            lock = json.loads((HERE / "node/package-lock.json").read_text("utf-8"))
            return str(lock["packages"][f"node_modules/{self.package}"]["version"])
        if not self.environment:
            return version(self.package)
        (site,) = (OWN_ENVIRONMENTS / self.environment / "lib").glob("python*/site-packages")
        return next(distributions(name=self.package, path=[str(site)])).version


_V1: Final = "http://localhost:8000/v1"
_ROOT: Final = "http://localhost:8000"
CLIENTS: Final[Mapping[str, Client]] = {
    "openai": Client("Python", "openai", f'`OpenAI(base_url="{_V1}")`'),
    "anthropic": Client("Python", "anthropic", f'`Anthropic(base_url="{_ROOT}")`'),
    "huggingface_hub": Client("Python", "huggingface_hub", f'`InferenceClient(base_url="{_V1}")`'),
    "LangChain": Client("Python", "langchain-core", f'`ChatOpenAI(base_url="{_V1}")`'),
    "LlamaIndex": Client("Python", "llama-index-core", f'`OpenAILike(api_base="{_V1}")`'),
    "Haystack": Client("Python", "haystack-ai", f'`OpenAIChatGenerator(api_base_url="{_V1}")`'),
    "litellm": Client("Python", "litellm", f'model `hosted_vllm/NAME`, `api_base="{_V1}"`'),
    "instructor": Client("Python", "instructor", "that of openai or anthropic"),
    "pydantic-ai": Client("Python", "pydantic-ai-slim", f'`OpenAIProvider(base_url="{_V1}")`'),
    "cohere": Client("Python", "cohere", f'`ClientV2(base_url="{_ROOT}")`'),
    "aider": Client("Python", "aider-chat", f"`--openai-api-base {_V1} --model openai/NAME`", "aider"),
    "openai for Node": Client("Node", "openai", f'`new OpenAI({{ baseURL: "{_V1}" }})`'),
    "anthropic for Node": Client("Node", "@anthropic-ai/sdk", f'`new Anthropic({{ baseURL: "{_ROOT}" }})`'),
    "Vercel AI SDK": Client("Node", "ai", f'`createOpenAICompatible({{ baseURL: "{_V1}" }})`'),
    "Hugging Face for Node": Client(
        "Node", "@huggingface/inference", f'`new InferenceClient(key, {{ endpointUrl: "{_V1}" }})`'
    ),
    "Qwen Code": Client("Node", "@qwen-code/qwen-code", f"`OPENAI_BASE_URL={_V1}`, `--auth-type openai`"),
    "Codex": Client("Node", "@openai/codex", "a provider in `config.toml` (see below)"),
}


def add_run(run: Mapping[str, Features]) -> None:
    """Replace what the current Python environment has recorded about the clients of ``run``."""
    record = json.loads(_RECORD.read_text("utf-8")) if _RECORD.exists() else {}
    for name, features in run.items():
        entry = {"version": CLIENTS[name].version(), "features": features}
        record.setdefault(name, {})[Path(sys.prefix).name] = entry
    _RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", "utf-8")


def rows() -> Iterator[list[str]]:
    """Yield a row for each client: name, language, versions, setting, and the features that work in all of these."""
    record = json.loads(_RECORD.read_text("utf-8"))
    for name, client in CLIENTS.items():
        runs = list(record[name].values())
        versions = sorted({run["version"] for run in runs}, reverse=True)
        features = Features(set.intersection(*(set(run["features"]) for run in runs)))
        yield [name, client.language, ", ".join(versions), client.setting, ", ".join(features)]
