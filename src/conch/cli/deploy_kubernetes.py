"""``conch deploy kubernetes``: manifests for servers of a repository."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Final

import click

from conch.cli.interrupting import signals_as_ctrl_c
from conch.cli.options import command_of
from conch.options.declaration import Directory, FileName, Range, option

_SECTION: Final = "Options"
_SERVERS: Final = "Servers"
_NETWORK: Final = "Network"
Count = Annotated[int, Range(1, 2**31 - 1)]
Number = Annotated[int, Range(0, 2**31 - 1)]


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """The options of ``conch deploy kubernetes``; most are fields of ``KubernetesTarget``."""

    # fmt: off
    repository: Directory = option(MISSING, _SECTION, "The model repository.", flags=("-r", "--model-repository"))
    output: Path = option(
        MISSING, _SECTION, "Folder to write; it must be new or empty.", flags=("-o", "--output"), metavar="OUT"
    )
    name: str = option("conch", _SECTION, "Name of the Kubernetes objects.")
    image: str = option("", _SECTION, "The image of the servers (default: conch:VERSION).")
    replicas: Count = option(1, _SERVERS, "Number of servers.")
    cpus: Count = option(2, _SERVERS, "Cores of each server; its engines use as many threads.")
    memory: str = option("", _SERVERS, "Memory of each server, as 4GiB (default: measured by loading the models here).")
    gpus: Number = option(0, _SERVERS, "GPUs of each server.")
    claim: str = option("models", _SERVERS, "PersistentVolumeClaim with the models.")
    location: str = option("", _SERVERS, "URL of the models, as s3://bucket/models, instead of a claim.")
    api_key_file: FileName = option("", _NETWORK, "File with API keys, <name>=<key> a line (default: one new key).")
    host: str = option("", _NETWORK, "Host name at which clients reach the servers (default: only in the cluster).")
    gateway: str = option("", _NETWORK, "Gateway for the host, instead of an Ingress.")
    ingress_namespace: str = option("ingress-nginx", _NETWORK, "Namespace of the Ingress controller or the Gateway.")
    monitoring_namespace: str = option("monitoring", _NETWORK, "Namespace of Prometheus.")
    # fmt: on


def _kubernetes(options: KubernetesOptions) -> None:
    """Write manifests for Kubernetes, with the memory that the models need."""
    from conch.deploy.kubernetes import KubernetesTarget, plan, write
    from conch.machine.memory import mebibytes

    values = {field.name: getattr(options, field.name) for field in fields(KubernetesTarget)}
    with signals_as_ctrl_c():
        planned = plan(KubernetesTarget(**values), options.output)
        write(planned, options.output)
    if planned.measured is not None:
        click.echo(
            f"measured: the server uses {mebibytes(planned.measured.server)}, "
            f"its {len(planned.models)} {'model' if len(planned.models) == 1 else 'models'} "
            f"{mebibytes(planned.measured.models)}"
        )
    for name in planned.texts:
        click.echo(f"wrote {options.output / name}")
    click.echo(f"\nThe steps are in {options.output / 'README.md'}.")


kubernetes_command = command_of("kubernetes", KubernetesOptions, _kubernetes)
