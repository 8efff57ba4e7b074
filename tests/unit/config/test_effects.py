"""Fields without effect are distinguished from fields with an effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from conch.config import effects
from conch.config.effects import ineffective_problems
from conch.config.pbtxt import parse


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (
            'backend: "python" batch_input { kind: BATCH_ELEMENT_COUNT target_name: "N" source_input: "A" }',
            ("batch_input",),
        ),
        ('model_operations { op_library_filename: "a.so" }', ("model_operations",)),
        ('instance_group [{ }, { host_policy: "p" }]', ("instance_group", 1, "host_policy")),
        (
            'model_metrics { metric_control { metric_identifier { family: "nv_other" } } }',
            ("model_metrics", 0, "metric_control", 0),
        ),
        (
            'ensemble_scheduling { step { model_namespace: "n" } }',
            ("ensemble_scheduling", 0, "step", 0, "model_namespace"),
        ),
        ("optimization { cuda { graphs: true } }", ("optimization", 0, "cuda")),
        ("optimization { graph { level: 1 } }", ("optimization", 0, "graph")),
        (
            'ensemble_scheduling { step { model_namespace: "n" } }',
            ("ensemble_scheduling", 0, "step", 0, "model_namespace"),
        ),
        (
            'model_metrics { metric_control { metric_identifier { family: "other" } } }',
            ("model_metrics", 0, "metric_control", 0),
        ),
        ('platform: "ensemble" instance_group { count: 2 }', ("instance_group",)),
    ],
)
def test_a_field_without_effect_is_named_with_its_place(text: str, field: tuple[str | int, ...]) -> None:
    [problem] = ineffective_problems(parse(text, "config.pbtxt"))
    assert problem.field == field
    assert " has no effect: " in problem.message


@pytest.mark.parametrize(
    "text",
    [
        "response_cache { enable: false }",
        'model_metrics { metric_control { metric_identifier { family: "nv_inference_first_response_histogram_ms" } } }',
        "instance_group { count: 2 kind: KIND_CPU }",
        'backend: "onnxruntime" optimization { graph { level: 1 } }',
        "optimization { input_pinned_memory { enable: true } }",
        'model_metrics { metric_control { metric_identifier { family: "conch_inference_queue_histogram_ms" } } }',
    ],
)
def test_supported_fields_and_default_values_are_not_reported(text: str) -> None:
    assert list(ineffective_problems(parse(text, "config.pbtxt"))) == []


def test_the_page_says_no_effect_of_the_same_fields() -> None:
    page = (Path(__file__).parents[3] / "docs" / "config.md").read_text("utf-8")
    rows = [[cell.strip() for cell in line.split("|")] for line in page.splitlines() if line.startswith("| `")]
    silent = {cells[1].strip("`") for cells in rows if cells[4].startswith("no effect")}
    named = {
        *effects.FIELDS_WITHOUT_EFFECT,
        *(f"instance_group.{name}" for name in effects.INSTANCE_FIELDS_WITHOUT_EFFECT),
        *(f"optimization.{name}" for name in effects.OPTIMIZATION_FIELDS_WITHOUT_EFFECT),
    }
    assert named - silent == set()
