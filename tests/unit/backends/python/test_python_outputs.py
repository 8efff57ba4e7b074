"""Outputs of a Python model that are not as its configuration declares them."""

from __future__ import annotations

import pytest

from tests.unit.backends.python.worker import LaunchWorker


def test_worker_has_the_warning_logged_once_for_all_instances(launch: LaunchWorker) -> None:
    source = """
    class TritonPythonModel:
        def execute(self, requests):
            return [
                pb_utils.InferenceResponse([pb_utils.Tensor("EXTRA", np.zeros(1, np.float32))]) for _ in requests
            ]
    """
    worker = launch(source, output=[{"name": "OUT", "data_type": "TYPE_STRING", "dims": [1]}])
    assert worker.infer("x", "y")["responses"][0]["outputs"] == {}
    warnings = [one for one in worker.logged if one["level"] == "WARNING"]
    messages = [warning["message"] for warning in warnings]
    assert [("EXTRA" in message, "'OUT'" in message) for message in messages] == [(True, True), (False, True)]
    assert all(warning["once"] for warning in warnings)


@pytest.mark.parametrize(("most", "decoupled", "warned"), [(8, False, True), (0, False, False), (8, True, False)])
def test_rows_count_where_the_model_batches_and_answers_once(
    launch: LaunchWorker, most: int, decoupled: bool, warned: bool
) -> None:
    source = """
    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                tensor = pb_utils.Tensor("OUT", np.zeros((3, 1), np.float32))
                sender = request.get_response_sender()
                sender.send(pb_utils.InferenceResponse([tensor]), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    """
    worker = launch(
        source,
        max_batch_size=most,
        output=[{"name": "OUT", "data_type": "TYPE_FP32", "dims": [1]}],
        model_transaction_policy={"decoupled": decoupled},
    )
    worker.submit("x")
    assert {worker.read()["op"], worker.read()["op"]} == {"response", "done"}
    assert any("the batch size 1" in one["message"] for one in worker.logged) is warned
