"""Container files: the image of ``deploy/container/Containerfile``, and additions that a platform requires."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from typing import Final

from conch.deploy.requirements import RepositoryRequirements

#: The folder for checkpoints from the Hub, which every user may write to.
HUB_CACHE: Final = "/tmp/huggingface"
_PACKAGES: Final = """
# What the Python models import: the image of conch has no pip.
FROM python:${{PYTHON}}-slim AS packages
COPY --from=conch /opt/conch /opt/conch
RUN python -m pip --python /opt/conch/bin/python install --no-cache-dir --disable-pip-version-check \\
    {packages}
"""


def containerfile(platform: str, needs: RepositoryRequirements, steps: Iterable[str]) -> str:
    """Return the container file, with the platform's ``steps`` (instructions and comments) at the end."""
    lines = [
        f"# conch on {platform}.  Build the image that this begins with in a checkout of conch:",
        "#",
        *(f"#     {line}" for line in base_commands(needs)),
    ]
    if needs.hub:
        lines += [
            "#",
            f"# The server downloads {', '.join(needs.hub)} when it starts, into {HUB_CACHE},",
            "# unless the files are in the image already.",
        ]
    lines += ["ARG CONCH=conch", *(["ARG PYTHON=3.12"] if needs.packages else []), "FROM ${CONCH} AS conch"]
    if needs.packages:
        lines += _PACKAGES.format(packages=" ".join(shlex.quote(package) for package in needs.packages)).splitlines()
    lines += ["", "FROM conch"]
    if needs.packages:
        lines.append("COPY --from=packages /opt/conch /opt/conch")
    return "\n".join([*lines, f"ENV HF_HOME={HUB_CACHE}", *steps]) + "\n"


def base_commands(needs: RepositoryRequirements) -> list[str]:
    """Return the commands that build the base image of a container file."""
    extras = f" --build-arg EXTRAS={','.join(needs.extras)}" if needs.extras else ""
    return ["make wheel", f"docker build -f deploy/container/Containerfile{extras} -t conch ."]


def words(command: Sequence[str]) -> str:
    """Return a command as a list in the syntax of container files, JSON and Terraform."""
    return json.dumps(list(command))
