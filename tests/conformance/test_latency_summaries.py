"""Latency summaries on the metrics page, with configured quantiles."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

from tests.conformance.counts import settled
from tests.conformance.raw import post, tensor
from tests.conftest import Server, Start
from tests.models import build

FAMILIES = ("request", "queue", "compute_input", "compute_infer", "compute_output")
_SAMPLE = re.compile(r"nv_inference_(\w+?)_summary_us(_count|_sum)?\{([^}]*)\} (\S+)")


def test_each_model_has_summaries_in_place_of_counters(tmp_path: Path, start: Start) -> None:
    repository = build(tmp_path / "models", "plus_one", "chain")
    flags = ("summary_latencies=true", "counter_latencies=false", "summary_quantiles=0.5:0.05,0.25:0.01")
    with start(repository, *(f"--metrics-config={flag}" for flag in flags)) as server:
        for _ in range(3):
            body = {"inputs": [tensor("X", "FP32", [1.0], [1, 1])]}
            assert post(server.http, "/v2/models/chain/infer", body).status == 200
        found = settled(server, lambda: _SAMPLE.findall(_page(server)))
        assert "nv_inference_request_duration_us" not in _page(server)

    samples = {(family, suffix, labels): value for family, suffix, labels, value in found}
    models = {name: f'model="{name}",version="1"' for name in ("chain", "plus_one")}
    assert samples.keys() == {
        (family, suffix, model + quantile)
        for family in FAMILIES
        for model in models.values()
        for suffix, quantile in (("_count", ""), ("_sum", ""), ("", ',quantile="0.5"'), ("", ',quantile="0.25"'))
    }
    assert {samples[family, "_count", models["chain"]] for family in FAMILIES} == {"3"}
    assert {samples[family, "_count", models["plus_one"]] for family in FAMILIES} == {"6"}
    whole = float(samples["request", "_sum", models["chain"]])
    assert 0 < float(samples["request", "", models["chain"] + ',quantile="0.5"']) < whole


def _page(server: Server) -> str:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics") as page:
        return page.read().decode()  # type: ignore[no-any-return]
