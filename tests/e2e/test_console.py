"""The console of a server with API keys: its files, event stream, pages of models, and log lines."""

from __future__ import annotations

import gzip
import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.console.models import add_chain, add_model
from tests.servers import ConchServer

_KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConchServer]:
    folder = tmp_path_factory.mktemp("console")
    for name in ("echo", "other"):
        add_model(folder / "models", name)
    add_chain(folder / "models", "chain")
    flags = ("--model-control-mode=explicit", "--load-model=chain", "--http-restricted-api=logging:x-admin=yes")
    with ConchServer(folder / "models", *flags, env={"CONCH_API_KEY": "secret"}) as started:
        yield started


def get(server: ConchServer, path: str, **headers: str) -> requests.Response:
    return requests.get(f"http://{server.http}{path}", headers={**_KEY, **headers}, timeout=60, allow_redirects=False)


def events(server: ConchServer, until: str) -> Iterator[tuple[str, Any]]:
    """Yield the events of a stream up to the first one with the name ``until``."""
    with requests.get(f"http://{server.http}/console/events", headers=_KEY, timeout=60, stream=True) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["Cache-Control"] == "no-store"
        event = ""
        for line in response.iter_lines(1):
            name, _, value = line.decode().partition(": ")
            if name == "event":
                event = value
            elif name == "data":
                yield event, json.loads(value)
                if event == until:
                    return


def test_files_need_no_key_and_allow_nothing_from_elsewhere(server: ConchServer) -> None:
    address = f"http://{server.http}/console"
    moved = requests.get(address, timeout=60, allow_redirects=False)
    assert (moved.status_code, moved.headers["Location"]) == (308, "console/")
    page = requests.get(address + "/", timeout=60)
    assert page.headers["Content-Type"].startswith("text/html")
    assert page.headers["Cache-Control"] == "no-cache"
    policy = dict(rule.split(" ", 1) for rule in page.headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert "unsafe" not in str(policy)
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    # Nothing inline, and every file that the page names is there.
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=", page.text)
    names = re.findall(r'(?:src|href)="\./([^"]+)"', page.text)
    assert any(name.endswith(".js") for name in names) and any(name.endswith(".css") for name in names)
    for name in names:
        file = requests.get(f"{address}/{name}", timeout=60)
        assert file.status_code == 200
        assert file.headers["Cache-Control"] == "no-cache"
        assert file.headers["X-Content-Type-Options"] == "nosniff"
        again = requests.get(f"{address}/{name}", headers={"If-None-Match": file.headers["ETag"]}, timeout=60)
        assert again.status_code == 304


def test_files_are_compressed_for_clients_that_accept_it(server: ConchServer) -> None:
    plain = get(server, "/console/", **{"Accept-Encoding": "identity"})
    assert "Content-Encoding" not in plain.headers
    with requests.get(f"http://{server.http}/console/", timeout=60, stream=True) as response:
        assert response.headers["Content-Encoding"] == "gzip"
        assert gzip.decompress(response.raw.read(decode_content=False)) == plain.content


@pytest.mark.parametrize("path", ["nothing", "assets/", "../routes.py", "%2e%2e/routes.py", "assets/../index.html"])
def test_other_paths_are_not_found(server: ConchServer, path: str) -> None:
    connection = http.client.HTTPConnection(server.http, timeout=60)
    connection.request("GET", f"/console/{path}")
    assert connection.getresponse().status == 404
    connection.close()


@pytest.mark.parametrize("path", ["events", "models/chain", "models/chain/statistics", "models/chain/log"])
def test_data_needs_a_key(server: ConchServer, path: str) -> None:
    response = requests.get(f"http://{server.http}/console/{path}", timeout=60)
    assert response.status_code == 401


def test_stream_begins_with_everything_and_goes_on_with_changes(server: ConchServer) -> None:
    seen = dict(events(server, "tick"))
    assert seen["server"]["control"] == "explicit"
    assert len(seen["history"]["time"]) == len(seen["history"]["rate"]) >= 1
    rows = {row["name"]: row for row in [*seen["models"], *seen["tick"]["changed"]]}
    assert rows["chain"]["backend"] == "ensemble"
    assert rows["echo"]["state"] == "READY" and rows["echo"]["instances"] == 1 and rows["echo"]["responsive"]
    assert seen["tick"]["ready"] and seen["tick"]["machine_total"] > 0


def test_models_that_were_never_loaded_are_listed(server: ConchServer) -> None:
    names = set()
    for event, data in events(server, "never"):
        names |= {
            row["name"] for row in (data if event == "models" else data.get("changed", []) if event == "tick" else [])
        }
        if "other" in names:
            break
    assert "other" in names


def test_page_of_an_ensemble_has_the_times_of_its_steps(server: ConchServer) -> None:
    body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}
    requests.post(f"http://{server.http}/v2/models/chain/infer", headers=_KEY, json=body, timeout=60).raise_for_status()
    page = get(server, "/console/models/chain").json()
    assert [step["model"] for step in page["steps"]] == ["echo", "echo"]
    assert page["steps"][1]["inputs"] == {"IN": "MIDDLE"}
    current = get(server, "/console/models/chain/versions/1/statistics").json()
    assert [step["count"] for step in current["steps"]] == [1, 1]
    assert all(step["total_ns"] >= step["compute_ns"] > 0 for step in current["steps"])
    assert current["latency"]["count"] == 1


def test_page_marks_what_was_completed(server: ConchServer) -> None:
    page = get(server, "/console/models/echo").json()
    assert {"name", "instance_group[0].count", "default_model_filename"} <= set(page["completed"])
    assert not {"backend", "input[0].name", "input[0].dims"} & set(page["completed"])
    current = get(server, "/console/models/echo/statistics").json()
    [worker] = current["workers"]
    assert worker["alive"] and worker["pid"] > 0


def test_model_that_is_not_loaded_has_no_page(server: ConchServer) -> None:
    for path in ("other", "nobody", "chain/versions/7"):
        assert get(server, f"/console/models/{path}").status_code == 404


def test_log_lines_of_a_model_need_the_header_of_their_api(server: ConchServer) -> None:
    assert get(server, "/console/models/echo/log").status_code == 403
    lines = get(server, "/console/models/echo/log", **{"x-admin": "yes"}).json()
    of_worker = {line["text"]: line["level"] for line in lines if line["from"] != "server"}
    assert of_worker["a line of the model"] == "info"
    assert of_worker["a warning of the model"] == "warning"
    assert any(line["text"].startswith("loading: echo") for line in lines)
    last = lines[-1]["number"]
    assert get(server, f"/console/models/echo/log?after={last}", **{"x-admin": "yes"}).json() == []


def test_console_is_served_only_where_the_options_say(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    for flags, status in (
        (["--no-console"], 404),
        (["--http-address=0.0.0.0"], 404),
        (["--http-address=0.0.0.0", "--console"], 200),
    ):
        with ConchServer(tmp_path / "models", "--allow-grpc=false", *flags) as server:
            assert get(server, "/console/").status_code == status, flags
