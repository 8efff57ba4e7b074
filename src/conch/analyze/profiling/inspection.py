"""What has to be known before the first measurement: of the models, and whether they can be asked at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from conch.analyze.options.settings import AnalyzeSettings
from conch.analyze.profiling.plans import plan_of
from conch.analyze.search.model_facts import ModelFacts
from conch.analyze.servers.base import AnalyzedServer, Configs
from conch.backends.native.threads import usable_cores
from conch.checkpoints.manifest import Manifest
from conch.errors import ConchError
from conch.perf.inputs.specs import read_model
from conch.perf.senders.channels.connecting import Address
from conch.perf.server.api import GrpcApi, HttpApi, ServerApi
from conch.perf.server.processes import find_server
from conch.perf.traffic import traffic_of
from conch.repository.scan import ModelRepository


def facts_of(repository: ModelRepository | None, configs: Configs, address: Address) -> Mapping[str, ModelFacts]:
    """What is known of models whose completed configurations are ``configs``; the server listens at ``address``.

    How many cores a server has that runs elsewhere is not known.
    """
    threads = usable_cores() if find_server(address).pids else 1
    return {
        model: ModelFacts(model, config, *_variants(repository, model), threads) for model, config in configs.items()
    }


def check_requests(settings: AnalyzeSettings, server: AnalyzedServer, models: Sequence[str]) -> None:
    """Raise what ``conch perf`` does for a model whose requests need more than is said, before anything is measured.

    The models are loaded as their repository has them; batches are left to each candidate.
    """
    with ExitStack() as closing:
        api: ServerApi = (
            closing.enter_context(GrpcApi(server.address))
            if settings.client_protocol == "grpc"
            else HttpApi(server.address)
        )
        for model in models:
            plan = replace(plan_of(settings, model, server.address), batch_size=1)
            spec = read_model(api.metadata(model, plan.version), api.config(model, plan.version), plan.version)
            traffic_of(plan, spec, "")


def _variants(repository: ModelRepository | None, model: str) -> tuple[tuple[str, ...], str]:
    """The variants of a converted model's latest version that may serve, and the one that does; none for others."""
    try:
        files = repository.describe(model) if repository is not None else None
        manifest = Manifest.read(files.version_directory(files.versions[-1])) if files and files.versions else None
    except ConchError:
        manifest = None
    if manifest is None:
        return (), ""
    return tuple(one.name for one in manifest.variants if one.usable), manifest.auto
