"""Workers are forked from processes that have imported what they need, and nothing shows it but time and memory."""

from __future__ import annotations

import re

from tests.conformance.raw import get, post, tensor
from tests.e2e.conftest import Serve
from tests.e2e.processes import alive, templates, workers
from tests.events import eventually
from tests.servers import ConchServer

EXPLICIT = ("--model-control-mode=explicit", "--load-model=identity_fp32")


def answers(server: ConchServer, model: str) -> bool:
    body = {"inputs": [tensor("INPUT", "FP32", [1.5])]}
    return post(server.http, f"/v2/models/{model}/infer", body).status == 200


def load(server: ConchServer, model: str) -> int:
    return post(server.http, f"/v2/repository/models/{model}/load").status


def test_models_serve_on_when_what_forked_them_is_killed_and_others_load(serve: Serve) -> None:
    server = serve("identity_fp32", "plus_one", flags=EXPLICIT)
    [template] = templates(server)
    before = workers(server)
    template.kill()
    eventually(lambda: not alive(template), "its end")
    assert answers(server, "identity_fp32")
    assert load(server, "plus_one") == 200
    assert len(workers(server)) == 2
    assert all(alive(worker) for worker in before)
    assert [one.pid for one in templates(server)] != [template.pid]


def test_metrics_tell_the_memory_that_no_model_has_alone(serve: Serve) -> None:
    server = serve("identity_fp32")

    def counted() -> bool:
        page = get(server.metrics, "/metrics").body.decode()
        [size] = re.findall(r"^conch_template_memory_bytes (\d+)$", page, re.MULTILINE)
        return int(size) > 1 << 20

    eventually(counted, "the figure")


def test_memory_that_is_not_shared_comes_back(serve: Serve) -> None:
    server = serve("identity_fp32", flags=(*EXPLICIT, "--worker-template-secs=1"))
    eventually(lambda: not templates(server), "the template's end")
    assert answers(server, "identity_fp32")
    assert post(server.http, "/v2/repository/models/identity_fp32/unload").status == 200
    assert load(server, "identity_fp32") == 200
    assert answers(server, "identity_fp32")


def test_nothing_is_shared_where_the_operator_says_so(serve: Serve) -> None:
    server = serve("identity_fp32", flags=("--worker-template-secs=0",))
    assert not templates(server)
    assert answers(server, "identity_fp32")
