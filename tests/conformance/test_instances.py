"""Instances that come and go while requests run: how often the model is initialized and finalized."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Event

from tests.conformance.raw import post, tensor
from tests.conftest import Server, Start
from tests.events import eventually
from tests.models import write

#: Writes a line for each call of initialize and finalize.
MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.note("initialize")

    def execute(self, requests):
        given = [request.inputs()[0].as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", values)]) for values in given]

    def finalize(self):
        self.note("finalize")

    def note(self, what):
        with open(NOTES, "a") as notes:
            notes.write(what + chr(10))
"""
CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] }
instance_group { count: COUNT kind: KIND_CPU }
"""


def test_instances_that_stay_run_on_while_others_come_and_go(
    start: Start, server_kind: str, tmp_path: Path, background: Callable[..., Future[None]]
) -> None:
    notes, ended = tmp_path / "notes", Event()

    def load(server: Server, count: int) -> None:
        write(tmp_path / "models", "m", CONFIG.replace("COUNT", str(count)))
        assert post(server.http, "/v2/repository/models/m/load", {}).status == 200

    def ask(server: Server) -> None:
        while not ended.is_set():
            body = {"inputs": [tensor("X", "INT32", [1], [1])]}
            assert post(server.http, "/v2/models/m/infer", body).status == 200

    def calls() -> tuple[int, int]:
        counts = Counter(notes.read_text().split())
        return counts["initialize"], counts["finalize"]

    write(tmp_path / "models", "m", CONFIG.replace("COUNT", "4"), {"1/model.py": f"NOTES = {str(notes)!r}\n{MODEL}"})
    with start(tmp_path / "models", "--model-control-mode=explicit") as server:
        # Loaded twice: to Triton, what Python writes beside the source the first time is a change of the version.
        load(server, 1)
        assert post(server.http, "/v2/repository/models/m/unload", {}).status == 200
        eventually(lambda: calls() == (1, 1), "the end of the first instance")
        load(server, 4)
        clients = [background(ask, server) for _ in range(4)]
        try:
            for count, expected in ((2, (5, 3)), (1, (5, 4)), (3, (7, 4))):
                load(server, count)
                eventually(lambda expected=expected: calls() == expected, f"{count} instances, {expected}")
        finally:
            ended.set()
        for client in clients:
            client.result()
