"""Plans the Ray Serve deployments for the options of ``conch deploy ray``. Reads the repository."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from conch import __version__
from conch.core.errors import invalid
from conch.deploy.ray.options import RayOptions
from conch.repository.roots import parse_location
from conch.repository.scan import ModelRepository
from conch.repository.stores.urls import StoreUrl

#: The deployment shared by all models if each replica loads models on demand.
SHARED: Final = "models"
#: The names of conch's own deployments; the registry records start failures of the ingress under its name.
REGISTRY: Final = "registry"
INGRESS: Final = "ingress"


@dataclass(frozen=True, slots=True)
class DeploymentPlan:
    """One deployment: its name, the models that it serves, the models that each replica loads, and its version.

    ``version`` changes whenever the replicas must be replaced: when a model's files or options have changed.
    """

    name: str
    models: tuple[str, ...]
    loads: tuple[str, ...]
    version: str


def shortage(options: RayOptions, plans: Sequence[DeploymentPlan], total: Mapping[str, float]) -> str:
    """Return why the ``total`` resources of a cluster do not suffice for ``plans``; empty if they do.

    The text names the flag to change.
    """
    replicas = len(plans) * options.min_replicas
    for resource, share in (("CPU", options.cpus_per_replica), ("GPU", options.gpus_per_replica)):
        needed, available = replicas * share, total.get(resource, 0.0)
        if total and needed > available:  # a starting cluster may not report resources yet
            fits = math.floor(available / replicas * 1000) / 1000
            return (
                f"{replicas} replicas with {share:g} {resource} each need {needed:g}, but the cluster has "
                f"{available:g}: reduce this with --{resource.lower()}s-per-replica {fits:g}, start fewer "
                "replicas, or add nodes"
            )
    return ""


def plan_deployments(options: RayOptions) -> list[DeploymentPlan]:
    """Plan the deployments of a repository's models. Raises INVALID_ARG for a missing model."""
    repository = ModelRepository([parse_location(path) for path in options.model_repository])
    try:
        return _plans(repository, options)
    finally:
        repository.close()


def _plans(repository: ModelRepository, options: RayOptions) -> list[DeploymentPlan]:
    groups = [tuple(model.split("+")) for model in options.models] or [(name,) for name in repository.names()]
    if not groups:
        raise invalid(f"the model repository is empty: {', '.join(options.model_repository)} contains no model")
    for name in (name for group in groups for name in group):
        if not repository.keys(name):
            raise invalid(f"--models: {repository.no_such_model(name)}")
    if options.max_models_per_replica:
        models = tuple(dict.fromkeys(name for group in groups for name in group))
        return [DeploymentPlan(SHARED, models, (), _version(repository, models, options))]
    plans = [DeploymentPlan(group[0], group[:1], group, _version(repository, group, options)) for group in groups]
    _check_names([plan.name for plan in plans])
    return plans


def _check_names(names: Sequence[str]) -> None:
    for name, times in Counter(names).items():
        if times > 1:
            raise invalid(f"--models names '{name}' twice")
        if "#" in name:
            raise invalid(f"'{name}' cannot be a Ray Serve deployment: its name must not contain '#'")
        if not name.isascii():  # Ray Serve's controller fails permanently
            raise invalid(
                f"'{name}' cannot be a Ray Serve deployment: its name must be ASCII, so rename the model, "
                "or set --max-models-per-replica"
            )
        if name in (REGISTRY, INGRESS):
            raise invalid(f"'{name}' cannot be a Ray Serve deployment: conch uses this name, so rename the model")


def _version(repository: ModelRepository, models: Sequence[str], options: RayOptions) -> str:
    """Return a digest of everything that replicas with these models run: conch's version, options, and model files.

    For a repository in a store it covers all models, because finding an ensemble's steps would require downloads.
    """
    settings = (
        f"{__version__} {options.model_repository} {options.replica_options} {options.max_models_per_replica} "
        f"{options.drain_secs}"
    )
    digest = blake2b(settings.encode(), digest_size=12)
    stored = any(isinstance(path, StoreUrl) for path in repository.paths)
    for name in repository.names() if stored else _with_step_models(repository, models):
        taken = repository.fingerprint(name)
        stamps = [*taken.config, *taken.rest, *(stamp for stamps in taken.versions.values() for stamp in stamps)]
        digest.update(f"{name} {sorted(stamps)}".encode())
    return digest.hexdigest()


def _with_step_models(repository: ModelRepository, models: Sequence[str]) -> list[str]:
    """Return the models and the existing models of the steps of ensembles among them."""
    names: dict[str, None] = {}
    left = list(models)
    while left:
        name = left.pop(0)
        if name in names or not repository.keys(name):
            continue
        names[name] = None
        left += [step.model_name for step in repository.describe(name).config.ensemble_scheduling.step]
    return list(names)
