"""Kubernetes: manifests for servers of a model repository, sized for its models.

A server on this machine shows the memory that they need. The Helm chart (``deploy/helm``) deploys the same pods; a
test compares them.
"""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from importlib.resources import files
from os import environ
from pathlib import Path
from textwrap import indent
from typing import Annotated, Final, NamedTuple
from urllib.parse import quote

from conch import __version__
from conch.core.errors import ConchError, internal, invalid, why_unreadable
from conch.deploy.bundle import base_commands, check_output, render, staged
from conch.deploy.dashboard import dashboard
from conch.deploy.requirements import RepositoryRequirements, read_requirements
from conch.deploy.trial import RESPONSE_SECONDS, free_port, wait_until_healthy
from conch.machine.guarded_server import GuardedServer
from conch.machine.memory import mebibytes, read_size, resident_bytes
from conch.machine.temporary import TemporaryFolder
from conch.measure.metrics_page import labels_of, read_page, samples
from conch.options.declaration import Directory, FileName, Range, option

_SECTION: Final = "Options"
_SERVERS: Final = "Servers"
_NETWORK: Final = "Network"
Count = Annotated[int, Range(1, 2**31 - 1)]
Number = Annotated[int, Range(0, 2**31 - 1)]

MOUNT: Final = "/models"
#: Names of Kubernetes objects; suffixes such as -dashboard need room.
_NAME: Final = re.compile(r"[a-z]([a-z0-9-]{0,51}[a-z0-9])?")
_REQUIRED_NAMES: Final = ("--name", "--ingress-namespace", "--monitoring-namespace")
#: Names that YAML 1.1 reads as booleans or nulls.
_YAML_WORDS: Final = ("true", "false", "yes", "no", "on", "off", "y", "n", "null")
#: Images and URLs: no character that YAML or a shell reads in its own way.
_PLAIN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9./:@_~%+=-]*[A-Za-z0-9/_]")
_HOST: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_MIB: Final = 1 << 20
#: Memory is requested in steps of this size (bytes).
_STEP: Final = 256 * _MIB
#: The request and the limit as multiples of the measured memory, and the bytes that the limit adds.
_REQUEST: Final = 1.2
_LIMIT: Final = 1.5
_FREE: Final = 512 * _MIB
#: The address of the server that is measured.
_LOCAL: Final = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """The options of ``conch deploy kubernetes``: what to deploy and where. Empty texts get defaults."""

    # fmt: off
    repository: Directory = option(MISSING, _SECTION, "The model repository.", flags=("-r", "--model-repository"))
    output: Path = option(
        MISSING, _SECTION, "Folder to write; it must be new or empty.", flags=("-o", "--output"), metavar="OUT"
    )
    name: str = option("conch", _SECTION, "Name of the Kubernetes objects.")
    image: str = option("", _SECTION, "The image of the servers (default: conch:VERSION).")
    replicas: Count = option(1, _SERVERS, "Number of servers.")
    cpus: Count = option(2, _SERVERS, "Cores of each server; its engines use as many threads.")
    memory: str = option(
        "", _SERVERS, "Memory of each server, such as 4GiB (default: measured by loading the models here)."
    )
    gpus: Number = option(0, _SERVERS, "GPUs of each server.")
    claim: str = option("models", _SERVERS, "PersistentVolumeClaim with the models.")
    location: str = option("", _SERVERS, "URL of the models, such as s3://bucket/models, instead of a claim.")
    api_key_file: FileName = option("", _NETWORK, "File with API keys, <name>=<key> per line (default: one new key).")
    host: str = option("", _NETWORK, "Host name at which clients reach the servers (default: only in the cluster).")
    gateway: str = option("", _NETWORK, "Gateway for the host, instead of an Ingress.")
    ingress_namespace: str = option("ingress-nginx", _NETWORK, "Namespace of the Ingress controller or the Gateway.")
    monitoring_namespace: str = option("monitoring", _NETWORK, "Namespace of Prometheus.")
    # fmt: on


@dataclass(frozen=True, slots=True)
class KubernetesPlan:
    """The written files by name, the models, and the memory that was measured, if any."""

    texts: Mapping[str, str]
    models: tuple[str, ...]
    measured: ServerMemory | None


def plan(options: KubernetesOptions) -> KubernetesPlan:
    """Read the repository, measure its memory unless ``memory`` is given, and return the files.

    Raises INVALID_ARG for values that Kubernetes refuses, as ``read_requirements`` and ``check_output`` do, and
    INTERNAL if the models cannot be measured.
    """
    _check(options)
    requirements = read_requirements(options.repository, MOUNT)
    check_output(options.output, options.repository)
    keys = _keys(options.api_key_file)
    if options.memory:
        measured, request, limit = None, *(2 * [_given(options.memory)])
    elif requirements.lacking:
        raise invalid(f"the memory cannot be measured here ({'; '.join(requirements.lacking)}): set --memory")
    else:
        measured = measure_memory(options.repository)
        request, limit = _rounded(measured.total * _REQUEST), _rounded(measured.total * _LIMIT + _FREE)
    image = options.image or f"conch:{__version__}"
    texts = dict(_texts(options, requirements, image, keys, request, limit))
    texts["kustomization.yaml"] = "resources:\n" + "".join(f"  - {name}\n" for name in texts)
    texts["README.md"] = _readme(options, requirements, image, keys, measured, (request, limit), texts)
    return KubernetesPlan(texts, requirements.models, measured)


def write(planned: KubernetesPlan, output: Path) -> None:
    """Write the files to the folder ``output``; the file with keys is readable by its owner only."""
    with staged(output) as folder:
        for name, text in planned.texts.items():
            path = folder / name
            path.touch(0o600 if name == "secret.yaml" else 0o644)
            path.write_text(text, encoding="utf-8")


def _check(options: KubernetesOptions) -> None:
    names = {
        "--name": options.name,
        "--claim": options.claim,
        "--gateway": options.gateway,
        "--ingress-namespace": options.ingress_namespace,
        "--monitoring-namespace": options.monitoring_namespace,
    }
    for flag, value in names.items():
        if value in _YAML_WORDS:
            raise invalid(f"{flag} must be a name that YAML reads as a text; got '{value}'")
        if (value or flag in _REQUIRED_NAMES) and not _NAME.fullmatch(value):
            raise invalid(f"{flag} must be lower-case letters, digits and dashes, at most 53 characters; got '{value}'")
    if options.host and not _HOST.fullmatch(options.host):
        raise invalid(f"--host must be a host name, such as models.example.com; got '{options.host}'")
    if options.gateway and not options.host:
        raise invalid("--gateway needs --host")
    for flag, value in {"--image": options.image, "--location": options.location}.items():
        if value and not _PLAIN.fullmatch(value):
            raise invalid(f"{flag} must be letters, digits and the signs . / : @ _ ~ % + = - only; got {value!r}")


def _keys(path: str) -> list[str]:
    """Return the lines of the file with API keys, or one new key."""
    if not path:
        return [f"default={secrets.token_urlsafe(32)}"]
    try:
        lines = [line.strip() for line in Path(path).read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(f"--api-key-file: {path} cannot be read: {why_unreadable(error)}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys or not all(re.fullmatch(r"[\w.-]+=[!-~]+", line, re.ASCII) for line in keys):
        raise invalid(f"--api-key-file: {path} must have lines <name>=<key>")
    return keys


def _given(memory: str) -> int:
    try:
        size = read_size(memory, 0)
    except ValueError:
        size = 0
    if not size:
        raise invalid(f"--memory must be a size, such as 4GiB; got '{memory}'")
    return _rounded(size)


def _rounded(size: float) -> int:
    return -int(-size // _STEP) * _STEP


def _quantity(size: int) -> str:
    return f"{size // _MIB}Mi"


def _texts(
    options: KubernetesOptions,
    requirements: RepositoryRequirements,
    image: str,
    keys: list[str],
    request: int,
    limit: int,
) -> Iterator[tuple[str, str]]:
    name = options.name
    egress, why = _egress(options, requirements)
    mounts = "\n            - {name: keys, mountPath: /etc/conch, readOnly: true}"
    volumes = f"\n        - name: keys\n          secret: {{secretName: {name}-keys, defaultMode: 0440}}"
    if not options.location:
        mounts = f"\n            - {{name: models, mountPath: {MOUNT}, readOnly: true}}{mounts}"
        claim = f"persistentVolumeClaim: {{claimName: {options.claim}, readOnly: true}}"
        volumes = f"\n        - name: models\n          {claim}{volumes}"
    peer = "\n        - namespaceSelector:\n            matchLabels: {kubernetes.io/metadata.name: %s}"
    yield (
        "server.yaml",
        render(
            "kubernetes/server.yaml",
            name=name,
            replicas=options.replicas,
            image=image,
            location=options.location or MOUNT,
            key_argument="\n            - --api-key-file=/etc/conch/keys",
            cpus=options.cpus,
            memory_request=_quantity(request),
            memory_limit=_quantity(limit),
            gpu_limit=f", nvidia.com/gpu: {options.gpus}" if options.gpus else "",
            mounts=mounts,
            volumes=volumes,
            from_ingress=f" and from {options.ingress_namespace}" if options.host else "",
            ingress_peer=peer % options.ingress_namespace if options.host else "",
            monitoring_namespace=options.monitoring_namespace,
            egress_comment=why,
            egress=egress,
        ),
    )
    yield "secret.yaml", render("kubernetes/secret.yaml", name=name, keys=indent("\n".join(keys), "    "))
    if options.host:
        template = "gateway" if options.gateway else "ingress"
        yield (
            f"{template}.yaml",
            render(f"kubernetes/{template}.yaml", name=name, host=options.host, gateway=options.gateway),
        )
    rules = (files("conch.deploy") / "templates/monitoring/rules.yaml").read_text(encoding="utf-8")
    groups = rules[rules.index("groups:") :].rstrip()
    yield (
        "monitoring.yaml",
        render(
            "kubernetes/monitoring.yaml",
            name=name,
            rules=indent(groups, "  "),
            dashboard=indent(dashboard().rstrip(), "    "),
        ),
    )


def _egress(options: KubernetesOptions, requirements: RepositoryRequirements) -> tuple[str, str]:
    """Return the rules for outgoing connections, and a comment with their reason."""
    reasons = [f"models from {options.location}"] if options.location else []
    reasons += [f"{', '.join(requirements.hub)} from the Hugging Face Hub"] if requirements.hub else []
    if not reasons:
        return " []", "\n# The server opens no connections."
    ports = "[{port: 53, protocol: UDP}, {port: 53}, {port: 443}]"
    return f"\n    - ports: {ports}", f"\n# The server downloads {' and '.join(reasons)}."


def _readme(
    options: KubernetesOptions,
    requirements: RepositoryRequirements,
    image: str,
    keys: list[str],
    measured: ServerMemory | None,
    memory: tuple[int, int],
    texts: Mapping[str, str],
) -> str:
    meanings = {
        "server.yaml": "Deployment, Service, PodDisruptionBudget and NetworkPolicy",
        "secret.yaml": "the API keys of clients; keep it out of version control",
        "ingress.yaml": f"Ingress for {options.host}; create the Secret `{options.name}-tls` with its certificate",
        "gateway.yaml": f"HTTPRoute and GRPCRoute for {options.host} at the Gateway `{options.gateway}`",
        "monitoring.yaml": "PodMonitor, PrometheusRule and the ConfigMap of a Grafana dashboard; "
        "without the Prometheus operator, delete its line in kustomization.yaml",
        "kustomization.yaml": "the list of these files",
    }
    request, limit = map(_quantity, memory)
    threads = f"Engines use {options.cpus} threads, which is the CPU limit of each server."
    if measured is None:
        sizing = f"Each server may use {limit} of memory (`--memory`). {threads}"
    else:
        sizing = (
            f"Each server requests {request} of memory and may use {limit}: on the machine that wrote this, the server "
            f"used {mebibytes(measured.server)} and the models {mebibytes(measured.models)} after loading. {threads}"
        )
    if options.location:
        models = f"The servers read the models from {options.location}; give them the credentials that it requires."
    else:
        models = f"Copy the content of {options.repository} into the PersistentVolumeClaim `{options.claim}`."
    packages = ""
    if requirements.packages:
        packages = f"\n   The models also import {', '.join(requirements.packages)}: install these in the image.\n"
    return render(
        "kubernetes/README.md",
        name=options.name,
        files="\n".join(f"| `{name}` | {meanings[name]} |" for name in texts),
        sizing=sizing,
        build="\n   ".join(base_commands(requirements)),
        image=image,
        packages=packages,
        models=models,
        # Encoded, a name is one word of the shell and of the URL.
        model=quote(requirements.models[0], safe=""),
        authorization=f" -H \"Authorization: Bearer $(sed -n 's/^ *{keys[0].partition('=')[0]}=//p' secret.yaml)\"",
    )


class ServerMemory(NamedTuple):
    """The memory of the server process, and of all workers and worker templates (bytes)."""

    server: int
    models: int

    @property
    def total(self) -> int:
        return self.server + self.models


def measure_memory(repository: Path) -> ServerMemory:
    """Load all models of ``repository`` and return the memory of the server and its workers.

    Raises INTERNAL if the server does not start or a model does not load.
    """
    with TemporaryFolder("deploy") as folder:
        port, metrics = free_port(), free_port()
        command = [
            sys.executable, "-m", "conch", "serve", f"--model-repository={repository.resolve()}",
            f"--http-address={_LOCAL}", f"--http-port={port}", "--allow-grpc=false", f"--metrics-port={metrics}",
            "--worker-template-secs=600", "--exit-timeout-secs=5",
        ]  # fmt: skip
        server = GuardedServer(command, folder / "log", dict(environ), folder)
        try:
            wait_until_healthy(server, port, "/v2/health/ready")
            # A page shows what was read for the page before.
            pages = [read_page(f"http://{_LOCAL}:{metrics}/metrics", RESPONSE_SECONDS) for _ in range(2)]
            return ServerMemory(resident_bytes(server.pid), sum(_on_cpu(pages[-1])))
        except ConchError as error:
            raise internal(f"the memory of the models cannot be measured here: {error.message}; set --memory") from None
        finally:
            server.close()


def _on_cpu(page: str) -> Iterator[int]:
    """Yield the memory of models on the CPU, and of the processes that their workers are forked from (bytes)."""
    for name, labels, value in samples(page):
        in_workers = labels_of(labels).get("kind") in ("workers", "shared_regions")
        if name == "conch_template_memory_bytes" or (name == "conch_model_memory_bytes" and in_workers):
            yield int(value)
