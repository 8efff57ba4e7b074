"""The task ``feature-extraction``: embeds texts by the modules of sentence-transformers, or else by their mean token.

A request may name a prompt of the checkpoint (``prompt_name``) and declare its texts as queries or documents
(``task``), with the defaults of ``encode``, ``encode_query`` and ``encode_document`` of sentence-transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from conch.backends.base.arrays import Request, Result
from conch.backends.tasks.encoders.encoder_task import TEXT, texts_of
from conch.backends.tasks.retrieval.images import IMAGE, ImageTextPipeline
from conch.backends.tasks.retrieval.outputs import HIDDEN_STATE, output_specs
from conch.backends.tasks.retrieval.pipeline import NetworkPipeline, Pipeline, TablePipeline, TextRequest
from conch.backends.tasks.task import ExecutionWork, OpenEngine, PreparedRequest, Task, TaskDescription
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.modules import NETWORKS, EmbeddingModel, Module
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer
from conch.core.errors import ConchError, unsupported
from conch.core.inference import TensorSpec
from conch.core.text_parameters import PROMPT_TEXT

_PROMPT: str = "prompt_name"
TASK: str = "task"
#: Tasks of Cohere's API for which a model may have a prompt or a route; otherwise its texts have no task.
PURPOSES: Final = ("classification", "clustering")


class Embedding(Task):
    """Embeds texts; texts of different tasks may go through different modules, which then run separately."""

    def __init__(self, checkpoint: Checkpoint, open_engine: OpenEngine) -> None:
        self.model = EmbeddingModel.read(checkpoint)
        self._defaults = checkpoint.options.extra
        by_modules: dict[tuple[int, ...], Pipeline] = {}
        self.pipelines_by_task: dict[str | None, Pipeline] = {}
        for task in self.model.tasks:
            modules: Sequence[Module] = self.model.path_of(task)
            key = tuple(map(id, modules))
            if key not in by_modules:
                by_modules[key] = open_pipeline(checkpoint, self.model, modules, open_engine)
            self.pipelines_by_task[task] = by_modules[key]
        self.pipelines = list(by_modules.values())

    @classmethod
    def describe(cls, checkpoint: Checkpoint) -> TaskDescription:
        model = EmbeddingModel.read(checkpoint)
        inputs = [replace(TEXT, optional=True), IMAGE] if model.reads_images else [TEXT]
        if model.saved:
            inputs += [TensorSpec(name, "BYTES", (1,), optional=True) for name in (_PROMPT, TASK)]
        return TaskDescription(tuple(inputs), output_specs(model))

    @classmethod
    def has_network(cls, checkpoint: Checkpoint) -> bool:
        return EmbeddingModel.read(checkpoint).networks

    @property
    def limits(self) -> dict[str, int | str]:
        limits = [pipeline.limits for pipeline in self.pipelines]
        return {name: value for own in limits for name, value in own.items()}

    @property
    def tokenizer(self) -> TextTokenizer:
        return self.pipelines_by_task.get(None, self.pipelines[0]).tokenizer

    @property
    def runtime_facts(self) -> dict[str, str]:
        facts = {"similarity": self.model.similarity} if self.model.saved else {}
        return facts if self.model.networks else {**facts, "engine": "numpy"}

    def prepare(self, request: Request) -> PreparedRequest:
        only_images = request.has(IMAGE.name) and not request.has(TEXT.name)
        texts = [] if only_images else texts_of(request, TEXT.name)
        _, task = self._choice(request)
        if task not in self.pipelines_by_task:
            self.model.path_of(task)  # raises the error that lists the tasks
        pipeline = self.pipelines_by_task[task]
        if HIDDEN_STATE.name in request.outputs and not pipeline.gives_hidden_state:
            raise unsupported(
                f"output '{HIDDEN_STATE.name}': the engine of this model returns one vector per text; a network that "
                "is not converted, or a graph without pooling, returns one per token"
            )
        return pipeline.prepare(request, texts, self.prompt_of(request), task)

    def prompt_of(self, request: Request) -> str:
        prompt = request.parameters.get(PROMPT_TEXT)
        return prompt if type(prompt) is str else self.model.prompts.text(*self._choice(request))

    def _choice(self, request: Request) -> tuple[str | None, str | None]:
        """Return the name of the prompt and the task, each None if the request does not choose one."""
        name, task = self._option(request, _PROMPT), self._option(request, TASK)
        if task in PURPOSES:
            name = name or (task if task in self.model.prompts.by_name else None)
            task = task if task in self.model.tasks else None
        return name, task

    def _option(self, request: Request, name: str) -> Any:
        """Return the request's input ``name``, else the model parameter of that name, else None."""
        value = request.option(name) if name in request.inputs else self._defaults.get(name)
        return value or None

    def execute(self, batch: Sequence[PreparedRequest], work: ExecutionWork) -> list[Result | ConchError]:
        requests: Sequence[TextRequest] = batch  # type: ignore[assignment]
        if len(self.pipelines) == 1:
            return self.pipelines[0].execute(requests, work)
        results: dict[int, Result | ConchError] = {}
        for pipeline in self.pipelines:
            own = [index for index, request in enumerate(requests) if request.pipeline is pipeline]
            if own:
                results |= zip(own, pipeline.execute([requests[index] for index in own], work), strict=True)
        return [results[index] for index in range(len(requests))]


def open_pipeline(
    checkpoint: Checkpoint, model: EmbeddingModel, modules: Sequence[Module], open_engine: OpenEngine
) -> Pipeline:
    """Open the pipeline of ``modules``; the first one reads texts, and maybe images."""
    if modules[0].methods is not None:
        return ImageTextPipeline(checkpoint, model, modules, open_engine)
    if modules[0].kind in NETWORKS:
        return NetworkPipeline(checkpoint, model, modules, open_engine)
    return TablePipeline(checkpoint, model, modules)
