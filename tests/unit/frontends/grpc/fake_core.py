"""A server core without workers: models are functions on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from conch.config.schema import ModelConfig
from conch.core.errors import ConchError, cancelled, invalid, not_found
from conch.core.inference import InferRequest, InferResponse, ModelSignature, TensorSpec
from conch.core.tensors import WireTensor
from conch.core.validation import validate_request
from conch.machine import logs
from conch.options.settings import Settings
from conch.server.regions import ClientRegions
from conch.telemetry.tracing.tracing import Tracing
from conch.telemetry.tracing.values import TraceValues

Behaviour = Callable[[InferRequest], None]


class FakeModel:
    """One input, one output; ``behaviour`` is what it does with a request that was accepted."""

    def __init__(
        self, name: str, behaviour: Behaviour, *, datatype: str = "BYTES", dims: tuple[int, ...] = (-1,),
        max_batch_size: int = 0, decoupled: bool = False, labels: list[str] | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.version = 1
        self.behaviour = behaviour
        self.cached_messages = None
        self.signature = ModelSignature(
            name,
            1,
            max_batch_size,
            {"INPUT0": TensorSpec("INPUT0", datatype, dims)},
            {"OUTPUT0": TensorSpec("OUTPUT0", datatype, dims)},
            decoupled,
        )
        self.shown_config = ModelConfig(name=name, backend="fake", max_batch_size=max_batch_size)
        self.shown_config.model_transaction_policy.decoupled = decoupled
        self.received: list[InferRequest] = []
        self.cancelled: list[InferRequest] = []
        self._labels = labels

    @property
    def metadata(self) -> dict[str, Any]:
        def specs(tensors: Mapping[str, TensorSpec]) -> list[dict[str, Any]]:
            batch = (-1,) if self.signature.max_batch_size else ()
            return [
                {"name": spec.name, "datatype": spec.datatype, "shape": (*batch, *spec.dims)}
                for spec in tensors.values()
            ]

        return {
            "name": self.name,
            "versions": ["1"],
            "platform": "fake",
            "inputs": specs(self.signature.inputs),
            "outputs": specs(self.signature.outputs),
        }

    def labels(self, output: str) -> list[str] | None:
        return self._labels

    def infer(self, request: InferRequest) -> None:
        validate_request(self.signature, request)
        self.received.append(request)
        request.on_cancel = self.cancel
        self.behaviour(request)

    @contextmanager
    def held(self) -> Iterator[None]:
        yield

    def cancel(self, request: InferRequest) -> None:
        self.cancelled.append(request)
        request.fail(cancelled())


def echo(request: InferRequest) -> None:
    """The input as the output, at once."""
    request.respond(output(request, request.inputs["INPUT0"]))


def hold(request: InferRequest) -> None:
    """No response until the request is cancelled, or the test answers it."""


def output(request: InferRequest, tensor: WireTensor, *, final: bool = True, **parameters: Any) -> InferResponse:
    return InferResponse(
        [WireTensor("OUTPUT0", tensor.datatype, tensor.shape, tensor.data)], final=final, parameters=parameters
    )


class FakeStatistics:
    """The counters of a model."""

    def __init__(self, model: FakeModel) -> None:
        self._model = model

    def snapshot(self) -> dict[str, Any]:
        return _statistics(self._model)


class FakeServer:
    """``executed`` counts inferences for the statistics, which perf_analyzer wants to see grow."""

    def __init__(self, settings: Settings | None = None, *models: FakeModel) -> None:
        self.settings = settings or Settings()
        self.models = {model.name: model for model in models}
        self.live = True
        self.ready = True
        self.exiting = False
        self.loaded: list[tuple[str, str | None, dict[str, bytes]]] = []
        self.unloaded: list[tuple[str, bool]] = []
        self.logs = logs.LogSettings()
        self.tracing = Tracing(TraceValues())
        self.regions = ClientRegions(False, list, ())

    def metadata(self) -> dict[str, Any]:
        return {"name": "triton", "version": "2.51.0", "extensions": ["statistics"]}

    def model(self, name: str, version: int = -1) -> FakeModel:
        model = self.models.get(name)
        if model is None:
            raise not_found(f"Request for unknown model: '{name}' is not found")
        if version not in (-1, model.version):
            raise not_found(f"Request for unknown model: '{name}' version {version} is not found")
        return model

    def model_metadata(self, name: str, version: int = -1) -> dict[str, Any]:
        return self.model(name, version).metadata

    def model_ready(self, name: str, version: int = -1) -> bool:
        try:
            self.model(name, version)
        except ConchError:
            return False
        return True

    async def public_index(self, ready_only: bool = False) -> list[dict[str, str]]:
        entries = [{"name": name, "version": "1", "state": "READY"} for name in self.models]
        return entries if ready_only else [*entries, {"name": "never_loaded"}]

    def counters(self, name: str = "", version: int = -1) -> list[FakeStatistics]:
        if name and name not in self.models:
            raise invalid(f"requested model '{name}' is not available")
        models = [self.models[name]] if name else list(self.models.values())
        return [FakeStatistics(model) for model in models]

    async def load(self, name: str, config: str | None, files: dict[str, bytes]) -> None:
        await asyncio.sleep(0)
        if name not in self.models:
            raise ConchError(f"failed to load '{name}', failed to poll from model repository")
        self.loaded.append((name, config, files))

    async def unload(self, name: str, dependents: bool) -> None:
        self.unloaded.append((name, dependents))

    def update_logs(self, changes: Mapping[str, Any]) -> None:
        self.logs = logs.LogSettings(**changes)


def _statistics(model: FakeModel) -> dict[str, Any]:
    count = len(model.received)
    duration = {"count": count, "ns": 1000 * count}
    names = ("success", "queue", "compute_input", "compute_infer", "compute_output")
    return {
        "name": model.name,
        "version": "1",
        "last_inference": 1,
        "inference_count": count,
        "execution_count": count,
        "inference_stats": dict.fromkeys(names, duration),
        "response_stats": {"0": {"success": duration}},
        "batch_stats": [{"batch_size": 1, "compute_infer": duration}],
        "memory_usage": [],
    }
