"""Health, metadata, configuration, statistics and settings, over both protocols."""

from __future__ import annotations

import pytest

from conch import __version__
from tests.conformance.clients import Client, floats, ints
from tests.conformance.counts import settled
from tests.conformance.raw import get, post
from tests.conftest import Server
from tests.events import eventually
from tests.oracle import TritonServer

FAMILIES = [
    "nv_inference_request_success", "nv_inference_request_failure", "nv_inference_count", "nv_inference_exec_count",
    "nv_inference_request_duration_us", "nv_inference_queue_duration_us", "nv_inference_compute_input_duration_us",
    "nv_inference_compute_infer_duration_us", "nv_inference_compute_output_duration_us",
    "nv_inference_pending_request_count", "nv_cpu_utilization", "nv_cpu_memory_total_bytes", "nv_cpu_memory_used_bytes",
]  # fmt: skip
EXTENSIONS = [
    "classification", "sequence", "model_repository", "model_repository(unload_dependents)", "schedule_policy",
    "model_configuration", "system_shared_memory", "cuda_shared_memory", "binary_tensor_data", "parameters",
    "statistics", "trace", "logging",
]  # fmt: skip


def test_server_is_live_and_ready(client: Client) -> None:
    assert client.api.is_server_live()
    assert client.api.is_server_ready()


@pytest.mark.parametrize(
    ("model", "version", "ready"),
    [
        ("add_sub", "", True),
        ("add_sub", "1", True),
        ("add_sub", "2", False),
        ("absent", "", False),
        ("version_all", "10", True),
        ("version_some", "2", False),
    ],
)
def test_model_readiness(client: Client, model: str, version: str, ready: bool) -> None:
    assert client.api.is_model_ready(model, version) == ready


def test_server_metadata(client: Client, server: Server) -> None:
    metadata = client.get("server_metadata")
    assert metadata["name"] == "triton"
    assert metadata["version"].startswith("2.")
    if isinstance(server, TritonServer):
        assert metadata["extensions"] == EXTENSIONS
    else:
        assert metadata["extensions"] == [*EXTENSIONS, f"conch({__version__})"]


def test_model_metadata(client: Client) -> None:
    assert client.get("model_metadata", "identity_batched") == {
        "name": "identity_batched",
        "versions": ["1"],
        "platform": "python",
        "inputs": [{"name": "INPUT", "datatype": "FP32", "shape": [-1, -1]}],
        "outputs": [
            {"name": "OUTPUT", "datatype": "FP32", "shape": [-1, -1]},
            {"name": "REQUESTS", "datatype": "INT32", "shape": [-1, 1]},
        ],
    }


@pytest.mark.parametrize(
    ("model", "versions"),
    [
        ("version_all", ["1", "2", "10"]),
        ("version_latest", ["3"]),
        ("version_two", ["2", "3"]),
        ("version_some", ["1", "3"]),
    ],
)
def test_version_policy_decides_which_versions_are_served(client: Client, model: str, versions: list[str]) -> None:
    assert client.get("model_metadata", model)["versions"] == versions


def test_metadata_of_unknown_model_is_refused(client: Client) -> None:
    with client.refused("NOT_FOUND", "Request for unknown model: 'absent' is not found"):
        client.get("model_metadata", "absent")


def test_config_is_completed(server: Server) -> None:
    config = get(server.http, "/v2/models/add_sub/config").json()
    assert config == {
        "name": "add_sub",
        "platform": "",
        "backend": "python",
        "runtime": "",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 0,
        "input": [
            {
                "name": name,
                "data_type": "TYPE_INT32",
                "format": "FORMAT_NONE",
                "dims": [16],
                "is_shape_tensor": False,
                "allow_ragged_batch": False,
                "optional": False,
                "is_non_linear_format_io": False,
            }
            for name in ("INPUT0", "INPUT1")
        ],
        "output": [
            {
                "name": name,
                "data_type": "TYPE_INT32",
                "dims": [16],
                "label_filename": "",
                "is_shape_tensor": False,
                "is_non_linear_format_io": False,
            }
            for name in ("OUTPUT0", "OUTPUT1")
        ],
        "batch_input": [],
        "batch_output": [],
        "optimization": {
            "priority": "PRIORITY_DEFAULT",
            "input_pinned_memory": {"enable": True},
            "output_pinned_memory": {"enable": True},
            "gather_kernel_buffer_threshold": 0,
            "eager_batching": False,
        },
        "instance_group": [
            {
                "name": "add_sub",
                "kind": "KIND_CPU",
                "count": 1,
                "gpus": [],
                "secondary_devices": [],
                "profile": [],
                "passive": False,
                "host_policy": "",
            }
        ],
        "default_model_filename": "model.py",
        "cc_model_filenames": {},
        "metric_tags": {},
        "parameters": {},
        "model_warmup": [],
    }


def test_config_by_auto_complete(client: Client) -> None:
    config = client.get("model_config", "auto_complete")
    config = config.get("config", config)
    assert config["max_batch_size"] == 4
    assert config["dynamic_batching"]["preferred_batch_size"] == [4]
    assert [i["name"] for i in config["input"]] == ["INPUT", "SCALE"]
    assert config["input"][1]["optional"] is True
    assert config["parameters"]["greeting"]["string_value"] == "hello"
    assert config["metric_tags"] == {"team": "a"}


def test_ensemble_of_a_decoupled_member_is_decoupled(server: Server) -> None:
    config = get(server.http, "/v2/models/repeated/config").json()
    assert config["model_transaction_policy"] == {"decoupled": True}


def statistics(client: Client, model: str) -> dict[str, dict[str, int]]:
    """Return the counts of the durations, and the two counters."""
    return settled(client.server, lambda: statistics_now(client, model))


def statistics_now(client: Client, model: str) -> dict[str, dict[str, int]]:
    stats = client.get("inference_statistics", model)["model_stats"][0]
    counts = {name: leaf.get("count", 0) for name, leaf in stats["inference_stats"].items()}
    batches = {row["batch_size"]: row["compute_infer"]["count"] for row in stats.get("batch_stats", [])}
    return {
        "stats": counts,
        "batches": batches,
        "counters": {
            "inference": stats.get("inference_count", 0),
            "execution": stats.get("execution_count", 0),
        },
    }


def statistics_after(client: Client, model: str, executions: int) -> dict[str, dict[str, int]]:
    """Return the statistics once this many executions are counted."""

    def counted() -> bool:
        return statistics_now(client, model)["counters"]["execution"] >= executions

    if client.kind == "triton":
        eventually(counted, f"{executions} executions of {model} are counted")
    return statistics(client, model)


def test_statistics_count_inferences_executions_and_batches(client: Client) -> None:
    model = "identity_batched"
    before = statistics(client, model)
    for batch in (1, 3, 3):
        client.infer(model, {"INPUT": floats(*[1] * batch).reshape(batch, 1)})
    after = statistics_after(client, model, before["counters"]["execution"] + 3)
    assert after["counters"]["inference"] - before["counters"]["inference"] == 7
    assert after["counters"]["execution"] - before["counters"]["execution"] == 3
    for name in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
        assert after["stats"][name] - before["stats"][name] == 3
    for name in ("fail", "cache_hit", "cache_miss"):
        assert after["stats"][name] == before["stats"][name]
    assert after["batches"][1] - before["batches"].get(1, 0) == 1
    assert after["batches"][3] - before["batches"].get(3, 0) == 2


def test_statistics_count_failures(client: Client) -> None:
    before = statistics(client, "asynchronous")
    with pytest.raises(Exception, match="negative"):
        client.infer("asynchronous", {"INPUT": floats(-1).reshape(1, 1)})
    after = statistics_after(client, "asynchronous", before["counters"]["execution"] + 1)
    assert after["stats"]["fail"] - before["stats"]["fail"] == 1
    assert after["stats"]["success"] == before["stats"]["success"]
    assert after["counters"]["inference"] == before["counters"]["inference"]
    assert after["counters"]["execution"] - before["counters"]["execution"] == 1


def test_refused_requests_are_not_counted(client: Client) -> None:
    before = statistics(client, "add_sub")
    with pytest.raises(Exception, match="expected 2 inputs"):
        client.infer("add_sub", {"INPUT0": ints(*range(16))})
    assert statistics(client, "add_sub") == before


def test_ensemble_counts_itself_and_its_members(client: Client) -> None:
    before, member = statistics(client, "chain"), statistics(client, "plus_one")
    client.infer("chain", {"X": floats(1, 2).reshape(2, 1)})
    after = statistics_after(client, "chain", before["counters"]["execution"] + 1)
    member_after = statistics_after(client, "plus_one", member["counters"]["execution"] + 2)
    assert after["counters"]["inference"] - before["counters"]["inference"] == 2
    assert after["counters"]["execution"] - before["counters"]["execution"] == 1
    assert member_after["counters"]["inference"] - member["counters"]["inference"] == 4


def test_statistics_of_all_models(client: Client) -> None:
    names = [stats["name"] for stats in client.get("inference_statistics")["model_stats"]]
    assert {"add_sub", "chain", "version_all"} <= set(names)
    assert names.count("version_all") == 3


def test_response_statistics_of_a_decoupled_model(server: Server, server_kind: str) -> None:
    if server_kind == "triton":
        pytest.skip("the Python backend of 2.51 reports none")

    def responses() -> dict[str, dict[str, int]]:
        stats = get(server.http, "/v2/models/generate/stats").json()["model_stats"][0]["response_stats"]
        return {index: {name: leaf["count"] for name, leaf in row.items()} for index, row in stats.items()}

    def ended() -> int:
        return responses().get("3", {}).get("empty_response", 0)

    def stream() -> None:
        count = ended()
        post(server.http, "/v2/models/generate/generate_stream", {"PROMPT": "x", "times": 3, "fail_at": 1})
        eventually(lambda: ended() == count + 1, "the statistics of the last response")

    stream()
    before = responses()
    stream()
    grown = {
        index: {name: count - before[index][name] for name, count in row.items() if count != before[index][name]}
        for index, row in responses().items()
    }
    assert grown == {
        "0": {"compute_infer": 1, "compute_output": 1, "success": 1},
        "1": {"compute_infer": 1, "compute_output": 1, "fail": 1},
        "2": {"compute_infer": 1, "compute_output": 1, "success": 1},
        "3": {"compute_infer": 1, "empty_response": 1},
    }


def test_log_settings_change_and_come_back(client: Client) -> None:
    changed = client.api.update_log_settings({"log_verbose_level": 1})
    assert "log_verbose_level" in str(changed)
    read = client.get("log_settings")
    settings = read.get("settings", read)
    level = settings["log_verbose_level"]
    assert level in (1, {"uint32_param": 1})
    client.api.update_log_settings({"log_verbose_level": 0})


def test_trace_settings_of_a_model_fall_back_to_the_global_ones(client: Client) -> None:
    def rate(model: str | None = None) -> str:
        read = client.get("trace_settings", model)
        value = read.get("settings", read)["trace_rate"]
        return value if isinstance(value, str) else value["value"][0]

    client.api.update_trace_settings("add_sub", {"trace_rate": "5"})
    assert (rate("add_sub"), rate()) == ("5", "1000")
    client.api.update_trace_settings(None, {"trace_rate": "7"})
    assert (rate("add_sub"), rate("add_strings")) == ("5", "7")
    client.api.update_trace_settings("add_sub", {"trace_rate": None})
    assert rate("add_sub") == "7"
    client.api.update_trace_settings(None, {"trace_rate": None})
    assert rate() == "1000"


def test_index_lists_every_version(client: Client) -> None:
    index = client.get("model_repository_index")
    models = index.get("models", index) if isinstance(index, dict) else index
    entries = {(entry["name"], entry.get("version")): entry["state"] for entry in models}
    assert {version for name, version in entries if name == "version_some"} == {"1", "3"}
    assert entries["add_sub", "1"] == "READY"
    assert entries["chain", "1"] == "READY"


def test_metrics_count_requests(server: Server) -> None:
    def count() -> float:
        page = get(server.metrics, "/metrics").body.decode()
        line = next(x for x in page.splitlines() if x.startswith('nv_inference_request_success{model="string_pair"'))
        return float(line.split()[-1])

    before = count()
    body = {"inputs": [{"name": "INPUT", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]}]}
    assert post(server.http, "/v2/models/string_pair/infer", body).status == 200
    assert count() == before + 1


def test_metrics_page(server: Server) -> None:
    page = get(server.metrics, "/metrics")
    assert page.status == 200
    assert page.headers["content-type"].startswith("text/plain")
    text = page.body.decode()
    for family in FAMILIES:
        assert f"# HELP {family} " in text
    assert 'nv_inference_count{_team="a",model="auto_complete",version="1"} ' in text
    for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER"):
        assert f'nv_inference_request_failure{{model="add_sub",reason="{reason}",version="1"}} ' in text
