"""The repository of an ingress: a remote model for every model of the cluster.

Only :class:`IngressRepository` does I/O: it writes files and is called in threads.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from google.protobuf import text_format

from conch.config import render
from conch.config.remote import REMOTE, take_over
from conch.config.schema import ModelConfig, datatype
from conch.deploy.ray.registry import ReplicaRecord, ServedModel, by_model

#: Inputs that contain a prompt, in order of preference.
_PROMPTS: Final = ("text_input", "prompt", "PROMPT", "QUERY")
#: Fields of a model's configuration that determine the form of requests.  Only replicas use the others, which may be
#: those of another version of conch.
_TAKEN_OVER: Final = (
    "backend", "parameters", "max_batch_size", "input", "output", "model_transaction_policy", "sequence_batching",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ClusterModel:
    """A model of the cluster: the URLs that serve it, its versions, and its configuration in an ingress.

    ``labels`` are the lines of its label files, by file name.

    ``generation`` changes when the inputs of a model without inputs in its configuration may have changed.
    """

    name: str
    urls: tuple[str, ...]
    versions: tuple[int, ...]
    config: str
    generation: str = ""
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()


def cluster_models(replicas: Iterable[ReplicaRecord]) -> dict[str, ClusterModel]:
    """Return the models of the replicas.

    If replicas of a model differ in its interface, as while it is replaced, only those that agree with the newest are
    used.
    """
    models = {}
    for name, served in by_model(replicas).items():
        newest = max(served, key=lambda pair: pair[0].started)[1]
        config = remote_config(newest, ())
        # Most replicas have equal configurations, so each distinct one is parsed only once.
        agreeing = {model for model in {model for _, model in served} if remote_config(model, ()) == config}
        urls = tuple(dict.fromkeys(_url(record, newest) for record, model in served if model in agreeing))
        generation = "" if newest.config else " ".join(sorted({record.version for record, _ in served}))
        labels = tuple((_label_file(index), names) for index, (_, names) in enumerate(newest.labels))
        models[name] = ClusterModel(
            name, urls, newest.versions or (1,), remote_config(newest, urls), generation, labels
        )
    return models


def _url(record: ReplicaRecord, model: ServedModel) -> str:
    """Return a replica's URL for a model: HTTP, which is cheaper, unless the model may send several responses."""
    if not model.config or json.loads(model.config).get("model_transaction_policy", {}).get("decoupled"):
        return record.grpc
    return record.http


def remote_config(model: ServedModel, urls: Sequence[str]) -> str:
    """Return the ``config.pbtxt`` of the remote model that represents ``model`` in an ingress."""
    written: dict[str, Any] = json.loads(model.config) if model.config else {}
    config = ModelConfig(name=model.name, backend=REMOTE)
    interface = json.dumps({key: written[key] for key in _TAKEN_OVER if key in written})
    take_over(config, render.from_json(interface, lenient=True))
    files = {output: _label_file(index) for index, (output, _) in enumerate(model.labels)}
    for output in config.output:
        output.label_filename = files.get(output.name, "")
    for key, value in _parameters(model.name, config, urls).items():
        config.parameters[key].string_value = value
    if model.versions:
        config.version_policy.specific.versions.extend(model.versions)
    return text_format.MessageToString(config)


def _label_file(index: int) -> str:
    """Return the name of a label file; an output's name may not be a valid file name."""
    return f"labels_{index}.txt"


def _parameters(name: str, config: ModelConfig, urls: Sequence[str]) -> Mapping[str, str]:
    parameters = {"url": ",".join(urls), "model": name}
    texts = {tensor.name for tensor in config.input if datatype(tensor.data_type) == "BYTES"}
    prompt = next((name for name in _PROMPTS if name in texts), "")
    stateless = not config.HasField("sequence_batching") and not config.model_transaction_policy.decoupled
    if prompt:
        parameters["affinity"] = prompt
    if stateless and config.input:
        parameters["repeat_lost"] = "true"
    if config.input:
        parameters["version"] = "same"
    else:  # one of many models that share the replicas, sent to where it is loaded
        parameters["sticky"] = "true"
    return parameters


@dataclass
class IngressRepository:
    """The model repository of an ingress, in ``directory``.

    ``written`` has the written configuration of each model, and the part of it that does not depend on URLs.
    """

    directory: Path
    written: dict[str, tuple[str, str]] = field(default_factory=dict)

    def write(self, models: Mapping[str, ClusterModel]) -> list[str]:
        """Write new and changed models; returns the names of those with a changed interface.

        Changed URLs alone do not count: the executors of loaded models get them directly, and the files are for loads.
        """
        changed = []
        for name, model in models.items():
            config = model.config.replace(",".join(model.urls), "")
            essence = f"{model.generation} {model.versions} {hash(model.labels)} {config}"
            written, before = self.written.get(name, ("", ""))
            if written != model.config or essence != before:
                self._write(model)
            self.written[name] = model.config, essence
            if essence != before:
                changed.append(name)
        return changed

    def remove(self, name: str) -> None:
        """Remove a model."""
        del self.written[name]
        shutil.rmtree(self.directory / name)

    def _write(self, model: ClusterModel) -> None:
        folder = self.directory / model.name
        for version in model.versions:
            (folder / str(version)).mkdir(parents=True, exist_ok=True)
        draft = self.directory / f".{model.name}"
        lines = [(name, "".join(f"{label}\n" for label in labels)) for name, labels in model.labels]
        for name, text in [*lines, ("config.pbtxt", model.config)]:
            draft.write_text(text, encoding="utf-8")
            draft.replace(folder / name)  # atomic, because a load may be reading it
