"""``conch deploy ray``: runs a model repository on a Ray cluster until Ctrl+C, or detached."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from conch.cli.interrupting import signals_as_ctrl_c
from conch.cli.options import command_of
from conch.deploy.ray.options import RayCommandOptions, RayOptions, ReplicaOptions
from conch.machine.ports import host_and_port

if TYPE_CHECKING:
    from conch.deploy.ray.cluster import Deployed, RayApplication
    from conch.options.settings import Listener

#: Options of conch serve that are determined by options of this command.
_DECIDED: Final = {
    "model_repository": ": use --model-repository",
    "model_control_mode": " (see --max-models-per-replica)",
    "load_model": ": use --models",
    "max_loaded_models": ": use --max-models-per-replica",
    "allow_http": ", and needs it",
    "allow_grpc": ", and needs it",
}

#: Options with which a replica would refuse requests from an ingress.
_OF_INGRESSES: Final = frozenset(
    {
        "http_use_ssl", "http_use_ssl_mutual", "grpc_use_ssl", "grpc_use_ssl_mutual", "http_restricted_api",
        "grpc_restricted_protocol", "api_key_file",
    }
)  # fmt: skip


def ray(command: RayCommandOptions) -> int:
    """Run the models of a repository on a Ray cluster: replicas supervised by Ray Serve, and an ingress on every node.

    Clients send requests to any node, as to conch serve. Run the command again to replace changed models only,
    without losing a request.
    """
    from conch.core.errors import invalid
    from conch.machine.extras import require

    name, detach = command.name, command.detach
    if not name or not name.isascii() or not name.isprintable() or "#" in name or "/" in name:
        raise invalid(f"--name '{name}': the name must be ASCII, without '#' or '/', and not empty")
    options = None if command.remove else _options(command)
    require("conch deploy ray", "ray", "ray.serve", extra="ray")

    from conch.deploy.ray.cluster import RayApplication, connected, start_serve, total_resources

    if options is None:
        with connected(command.address, start=False):
            ray_application = RayApplication(name)
            if not ray_application.is_deployed:
                raise invalid(f"the cluster has no application '{name}'")
            ray_application.remove()
        print(f"removed '{name}'")
        return 0

    from conch.deploy.ray.planning import plan_deployments, shortage

    _check_ports(options.ingress_options)
    plans = plan_deployments(options)
    # The order matters: Ray installs its own handler for SIGTERM.
    with connected(command.address) as alone, signals_as_ctrl_c():
        if alone and detach:
            raise invalid("--detach needs a running cluster: start one with 'ray start --head', or set --address")
        if alone:
            print("started a Ray cluster on this machine, which ends with this command")
        if short := shortage(options, plans, total_resources()):
            if alone:  # no node can be added
                raise invalid(short)
            print(short, flush=True)
        start_serve()
        application = RayApplication(name)
        new = not application.is_deployed
        if not new:
            print(f"replacing the changed parts of '{name}', which already runs on the cluster", flush=True)
        try:
            application.deploy(options, plans)
            deployed = application.wait(plans, command.timeout_secs, partial(print, flush=True))
            _show(deployed, _ingress_listeners(options))
            if not detach:
                threading.Event().wait()
        except KeyboardInterrupt:
            if new or not detach:  # the previous version, which was to remain, continues to serve
                _remove(application, name)
            else:
                raise
        except BaseException:
            if new:  # the previous version continues to serve
                _remove(application, name)
            raise
    return 0


def _options(command: RayCommandOptions) -> RayOptions:
    from conch.core.errors import invalid
    from conch.library.flags import plan

    repository, minimum, maximum = command.model_repository, command.min_replicas, command.max_replicas
    if not repository:
        raise invalid("--model-repository must be specified")
    if maximum is not None and maximum < minimum:
        raise invalid(f"--max-replicas {maximum} is less than --min-replicas {minimum}")
    listening = {f"{kind}_address": command.host for kind in ("http", "grpc")}
    ports = {f"{kind}_port": getattr(command, f"{kind}_port") for kind in ("http", "grpc", "metrics")}
    of_replicas = _settings("--replica-option", command.replica_options)
    of_ingress = _settings("--ingress-option", command.ingress_options)
    plan(None, repository, of_replicas, ports=True)  # validates the options of replicas
    plan(None, repository, of_ingress, ports=True)  # and of ingresses
    passed = {field.name: getattr(command, field.name) for field in fields(ReplicaOptions)}
    return RayOptions(
        **passed | {"model_repository": tuple(map(_absolute, repository))},
        models=tuple(filter(None, (part.strip() for part in command.models.split(",")))),
        max_replicas=maximum or minimum,
        replica_options=of_replicas,
        ingress_options={**listening, **ports, **of_ingress},
    )


def _check_ports(ingress: Mapping[str, Any]) -> None:
    """Raise INVALID_ARG for a port that is used twice, because no ingress could start."""
    from conch.core.errors import invalid

    ports = {f"--{kind}-port": int(ingress[f"{kind}_port"]) for kind in ("http", "grpc", "metrics")}
    taken: dict[int, str] = {}
    for flag, port in ports.items():
        if port and port in taken:
            raise invalid(f"{flag} {port} is also the port of {taken[port]}: choose another")
        taken[port] = flag


def _absolute(repository: str) -> str:
    """Return the absolute path of a directory, because replicas run elsewhere; store URLs are unchanged."""
    return repository if "://" in repository else os.path.abspath(repository)


def _settings(flag: str, texts: Iterable[str]) -> dict[str, str | tuple[str, ...]]:
    """Return options of conch serve by name; a repeated option has all of its values."""
    from conch.core.errors import invalid

    grouped: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise invalid(f"{flag} {text}: write NAME=VALUE, such as log_verbose=1")
        name = name.removeprefix("--").replace("-", "_")
        if name in _DECIDED:
            raise invalid(f"{flag} {text}: conch deploy ray sets this option itself{_DECIDED[name]}")
        if name in _OF_INGRESSES and flag == "--replica-option":
            raise invalid(f"{flag} {text}: an ingress could not call such a replica; use --ingress-option {text}")
        grouped[name] = (*grouped.get(name, ()), value)
    return {name: values[0] if len(values) == 1 else values for name, values in grouped.items()}


def _ingress_listeners(options: RayOptions) -> Mapping[str, Listener]:
    from conch.library.flags import plan

    return plan(None, options.model_repository, options.ingress_options, ports=True).settings.listeners


def _show(deployed: Deployed, listeners: Mapping[str, Listener]) -> None:
    counts: dict[str, int] = {}
    for replica in deployed.replicas:
        counts[replica.deployment] = counts.get(replica.deployment, 0) + 1
    for deployment, count in sorted(counts.items()):
        print(f"{deployment}: {count} {'replica' if count == 1 else 'replicas'}")
    for ingress in deployed.ingresses:
        print(f"node {ingress.node[:8]}: {' '.join(ingress_urls(ingress.addresses, listeners))}")
    sys.stdout.flush()


def ingress_urls(addresses: Mapping[str, tuple[str, int]], listeners: Mapping[str, Listener]) -> list[str]:
    """Return the URLs of an ingress: HTTP, gRPC, its other ports, and last the metrics."""
    order = ("http", "grpc", *(kind for kind in addresses if kind not in ("http", "grpc", "metrics")), "metrics")
    urls = []
    for host, port, kind in ((*addresses[kind], kind) for kind in order if kind in addresses):
        scheme, path = ("grpc", "") if kind == "grpc" else ("http", "/metrics" if kind == "metrics" else "")
        scheme += "s" if listeners[kind].encrypted else ""
        urls.append(f"{scheme}://{host_and_port(host, port)}{path}")
    return urls


def _remove(application: RayApplication, name: str) -> None:
    print(f"removing '{name}' ...", flush=True)
    application.remove()


ray_command = command_of("ray", RayCommandOptions, ray)
