"""The metrics page of both servers: families and labels."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Server, Start
from tests.models import write

MODEL = """
class TritonPythonModel:
    def execute(self, requests):
        return []
"""
TENSORS = """
input {{ name: "X" data_type: TYPE_INT32 dims: [ 1 ] }}
output {{ name: "Y" data_type: TYPE_INT32 dims: [ 1 ] }}
metric_tags {{ key: "team" value: "{team}" }}
"""
PYTHON = 'backend: "python" max_batch_size: 2'
CONFIGS = {
    "plain": PYTHON + ' metric_tags { key: "quoted" value: "x\\"y" }',
    "dynamic": PYTHON + " dynamic_batching { }",
    "direct": PYTHON + " sequence_batching { direct { } }",
    "oldest": PYTHON + " sequence_batching { oldest { max_candidate_sequences: 2 } }",
    "iterative": PYTHON + " sequence_batching { iterative_sequence: true }",
    "ensemble": """
        platform: "ensemble" max_batch_size: 2 ensemble_scheduling { step {
            model_name: "plain" model_version: -1 input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" }
        } }
    """,
}
#: Families that Triton 2.51 lacks and later releases have.
NEWER = {"nv_model_load_duration_secs", "nv_inference_first_response_histogram_ms"}


@pytest.fixture(scope="module")
def lines(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    folder: Path = tmp_path_factory.mktemp("metrics")
    for team, (name, config) in enumerate(CONFIGS.items()):
        files = {} if name == "ensemble" else {"1/model.py": MODEL}
        write(folder / "models", name, config + TENSORS.format(team=team), files)
    (folder / "models/ensemble/1").mkdir(exist_ok=True)
    flags = ("--metrics-config=summary_latencies=true", "--metrics-config=histogram_latencies=true")
    with start(folder / "models", *flags, log=folder / "log") as server:
        yield _page(server)


def _page(server: Server) -> list[str]:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics") as page:
        return page.read().decode().splitlines()  # type: ignore[no-any-return]


def test_every_kind_of_model_has_a_gauge_of_pending_requests_with_its_tags(lines: list[str]) -> None:
    assert {line for line in lines if line.startswith("nv_inference_pending_request_count")} == {
        'nv_inference_pending_request_count{_quoted="x\\"y",_team="0",model="plain",version="1"} 0',
        *(
            f'nv_inference_pending_request_count{{_team="{team}",model="{name}",version="1"}} 0'
            for team, name in enumerate(CONFIGS)
            if team
        ),
    }


def test_families_are_those_of_a_server_without_a_cache(lines: list[str]) -> None:
    families = {line.split()[2] for line in lines if line.startswith("# TYPE nv_")} - NEWER
    durations = {"request", "queue", "compute_input", "compute_infer", "compute_output"}
    assert families == {
        *(f"nv_inference_{name}_duration_us" for name in durations),
        *(f"nv_inference_{name}_summary_us" for name in durations),
        *(f"nv_inference_{name}" for name in ("request_success", "request_failure", "count", "exec_count")),
        "nv_inference_pending_request_count",
        *(f"nv_pinned_memory_pool_{name}_bytes" for name in ("total", "used")),
        *(f"nv_cpu_memory_{name}_bytes" for name in ("total", "used")),
        "nv_cpu_utilization",
    }
