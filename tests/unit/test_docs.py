"""The documents name everything that a user may write or read: parameters, tasks, metrics, options, extras."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest

from conch.backends.generation.options import GENERATION_PARAMETERS
from conch.backends.graphs.onnxruntime import PARAMETERS as ONNXRUNTIME_PARAMETERS
from conch.backends.graphs.openvino import PARAMETERS as OPENVINO_PARAMETERS
from conch.backends.graphs.pytorch import PARAMETERS as PYTORCH_PARAMETERS
from conch.backends.huggingface import TASK_PARAMETERS
from conch.backends.io_formats.text import INPUTS, OUTPUTS
from conch.backends.tasks.huggingface_backend import TASKS
from conch.checkpoints.options import CHECKPOINT_PARAMETERS
from conch.cli.deploy_clouds import SageMakerOptions, VertexOptions
from conch.cli.perf import REFUSED, perf_command
from conch.config import remote
from conch.config.parameters import Parameter
from conch.convert.causal.agreement import TOLERANCES as CAUSAL_TOLERANCES
from conch.convert.encoder.conversion import TOLERANCES as ENCODER_TOLERANCES
from conch.convert.options import ConvertOptions
from conch.deploy.ray.options import RayCommandOptions
from conch.measure.perf.options import PerfOptions
from conch.options.declaration import options_of
from conch.telemetry.families import GENERATION, WORK

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/README.md", "benchmarks/README.md")
DOCUMENTS = (
    "huggingface.md",
    "generation.md",
    "inflight_batcher.md",
    "openai.md",
    "convert.md",
    "backends.md",
    "caching.md",
    "perf.md",
    "monitoring.md",
    "reports.md",
    "stores.md",
    "tracing.md",
    "ray.md",
)


def document(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def rows(text: str) -> list[list[str]]:
    """The cells of every row of its tables, without marks."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip().replace("*", "") for cell in line.strip("|").split("|")] for line in lines]


def named(text: str) -> set[str]:
    """All that stands between backquotes in the first column of its tables."""
    return {name for cells in rows(text) for name in re.findall(r"`([^`]+)`", cells[0])}


def declared(parameters: Iterable[Parameter]) -> dict[str, list[str]]:
    return {parameter.name: [parameter.values, parameter.default, parameter.help] for parameter in parameters}


@pytest.mark.parametrize(
    ("name", "tables"),
    [
        ("huggingface.md", [CHECKPOINT_PARAMETERS, TASK_PARAMETERS]),
        ("remote.md", [remote.PARAMETERS.declared]),
        ("backends.md", [ONNXRUNTIME_PARAMETERS.declared, OPENVINO_PARAMETERS.declared, PYTORCH_PARAMETERS.declared]),
    ],
)
def test_tables_of_parameters_are_what_backends_declare(name: str, tables: list[Sequence[Parameter]]) -> None:
    lines = [line for line in document(name).splitlines() if line.startswith("| `")]
    rows = {
        cells[0].strip("`"): cells[1:]
        for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    }
    expected = declared(one for table in tables for one in table)
    assert {key: rows.get(key) for key in expected} == expected


def test_parameters_of_generation_are_documented() -> None:
    assert declared(GENERATION_PARAMETERS).keys() - named(document("generation.md")) == set()


def test_every_parameter_that_is_read_is_declared_and_every_declared_one_is_read() -> None:
    """``Options`` has no field for these, so a slip in a name would read a default for ever."""
    read: set[str] = set()
    source = ROOT / "src" / "conch"
    for path in [*(source / "backends").rglob("*.py"), *(source / "checkpoints" / "tokenizers").glob("*.py")]:
        if path.stem != "tensorrtllm":  # which reads names of its own
            read |= set(re.findall(r"""options\.(?:text|integer|number|flag)\(\s*"(\w+)\"""", path.read_text()))
    known = declared((*TASK_PARAMETERS, *GENERATION_PARAMETERS)).keys()
    assert read - known == set()
    assert known - read == {
        "prompt_name", "function_to_apply",  # by ``EncoderTask.option``
        "max_answer_len", "doc_stride",  # in a loop
        "max_audio_seconds", "max_image_pixels",  # by ``media``
        "batch_scheduler_policy",  # among choices
        "lora_modules", "lora_folders",  # by ``Options.adapters`` and ``adapter_folders``
        "max_candidate_labels", "max_media", "media_cache_bytes",  # by ``Options.positive``
        "aggregation_strategy",  # by its constant
        "n_gpu_layers", "n_ubatch", "type_k", "type_v", "flash_attn", "kv_unified", "cache_ram",  # by ``Arguments``
        "mmproj",  # by ``Checkpoint``
    }  # fmt: skip


def test_tasks_are_documented() -> None:
    assert TASKS.keys() - named(document("huggingface.md")) == set()


def test_metrics_are_documented() -> None:
    assert {metric.name for metric in WORK} - named(document("huggingface.md")) == set()


@pytest.mark.parametrize(
    ("page", "declaring"),
    [
        ("convert.md", ConvertOptions),
        ("deploy.md", SageMakerOptions),
        ("deploy.md", VertexOptions),
        ("perf.md", PerfOptions),
        ("ray.md", RayCommandOptions),
    ],
)
def test_options_are_documented(page: str, declaring: type) -> None:
    written = set(re.findall(r"--[\w-]+", document(page)))
    flags = {option.name: set(option.flags[-1].split("/")) for option in options_of(declaring).values()}
    assert [name for name, known in flags.items() if not known & written] == []


def test_what_perf_does_otherwise_than_perf_analyzer_is_documented() -> None:
    """At least what it refuses, and nothing that does not exist."""
    known = {flag for param in perf_command.params if isinstance(param, click.Option) for flag in param.opts}
    written = {name for name in named(document("perf.md")) if name.startswith("-")}
    assert written - known == set()
    assert {flag for flag in REFUSED if flag != "--version"} - written == set()


@pytest.mark.parametrize("tolerances", [ENCODER_TOLERANCES, CAUSAL_TOLERANCES])
def test_tolerances_are_those_of_the_verdict(tolerances: dict[str, Any]) -> None:
    names = [field.name for field in fields(next(iter(tolerances.values())))]
    tables = rows(document("convert.md"))
    table = {cells[0]: cells[1:] for cells in tables if cells[0] in tolerances and len(cells) == 1 + len(names)}
    for precision, tolerance in tolerances.items():
        written = [float(cell.removesuffix(" %")) / (100 if "%" in cell else 1) for cell in table[precision]]
        assert written == pytest.approx([getattr(tolerance, name) for name in names]), precision


def test_what_generation_takes_and_gives_is_documented() -> None:
    text = document("generation.md")
    assert {spec.name for spec in (*INPUTS, *OUTPUTS)} - set(re.findall(r"`(\w+)`", text)) == set()
    metrics = {metric.name for metric in GENERATION} - set(re.findall(r"`(vllm:\w+)`", text))
    assert all(re.search("queue|prefill|decode|_tokens|_params_|per_output_token", name) for name in metrics), metrics


def project() -> dict[str, Any]:
    loaded: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return loaded


def test_extras_are_documented() -> None:
    extras = project()["optional-dependencies"].keys()
    offered = "".join(map(document, (*DOCUMENTS, "monitoring.md")))
    in_commands = {name for extra in re.findall(r"\.\[([\w,]+)\]", offered) for name in extra.split(",")}
    written = in_commands | set(re.findall(r"extra\s`(\w+)`", offered))
    assert extras - written == {"demo", "dev"}
    assert extras - named(document("README.md")) == set()


def test_no_command_installs_the_unrelated_package_of_pypi() -> None:
    """Its name is conch. Ours is conch-server there."""
    files = [ROOT / name for name in PAGES]
    files += [
        path for folder in ("docs", "src", "examples", "deploy", "benchmarks") for path in (ROOT / folder).rglob("*")
    ]
    texts = {path: path.read_text("utf-8") for path in files if path.suffix in (".md", ".py", ".sh", ".toml", ".yaml")}
    assert [path for path, text in texts.items() if re.search(r"pip install [^\n`#]*?[\"' ]conch\b(?!-)", text)] == []


def test_one_module_alone_writes_the_commands_that_install_extras() -> None:
    sources = {path.name: path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py")}
    written = re.compile(r"conch(-server)?\[|DISTRIBUTION\b")
    assert {name for name, text in sources.items() if written.search(text)} == {"extras.py"}


def test_the_lowest_versions_are_those_that_are_declared() -> None:
    lines = [line for line in (ROOT / "constraints-lowest.txt").read_text().splitlines() if not line.startswith("#")]
    lowest = dict(line.split("==") for line in lines)
    declared = dict(
        re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", dependency).groups() for dependency in project()["dependencies"]
    )  # type: ignore[union-attr]
    assert lowest.keys() == declared.keys()
    for name, version in declared.items():
        assert f"{lowest[name]}.".startswith(f"{version}."), name


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", document(name)):
        file, _, place = target.partition("#")
        if not place:  # a page or a picture, see below
            continue
        text = document(file or name)
        headings = {re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
                    for line in text.splitlines() if line.startswith("#")}  # fmt: skip
        assert place in headings, target


@pytest.mark.parametrize("page", PAGES)
def test_pages_link_to_files_that_there_are(page: str) -> None:
    source = ROOT / page
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", source.read_text("utf-8"))
    assert [target for target in targets if not (source.parent / target).exists()] == []
