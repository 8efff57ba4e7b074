"""What a killed server has left in the temporary directory is gone when the next one has started."""

from __future__ import annotations

import base64
import json
import signal
from contextlib import ExitStack
from pathlib import Path

from tests.conformance.raw import post
from tests.events import eventually
from tests.models import HERE
from tests.servers import ConchServer

CODE = (HERE / "main" / "identity_fp32" / "1" / "model.py").read_bytes()
TENSOR = {"data_type": "TYPE_FP32", "dims": [-1]}
CONFIG = {"backend": "python", "input": [{"name": "INPUT", **TENSOR}], "output": [{"name": "OUTPUT", **TENSOR}]}


def test_uploaded_models_of_a_killed_server_are_gone_at_the_next_start(tmp_path: Path, stack: ExitStack) -> None:
    for folder in ("models", "temporary"):
        (tmp_path / folder).mkdir()
    temporary = tmp_path / "temporary"

    def start() -> ConchServer:
        environment = {"TMPDIR": str(temporary)}
        return stack.enter_context(ConchServer(tmp_path / "models", "--model-control-mode=explicit", env=environment))

    def upload(server: ConchServer) -> Path:
        before = set(temporary.glob("conch-model-*"))
        files = {"config": json.dumps(CONFIG), "file:1/model.py": base64.b64encode(CODE).decode()}
        reply = post(server.http, "/v2/repository/models/uploaded/load", {"parameters": files})
        assert reply.status == 200, reply.body
        [made] = set(temporary.glob("conch-model-*")) - before
        return made

    killed, other = start(), start()
    left, used = upload(killed), upload(other)
    assert killed.process is not None
    killed.process.send_signal(signal.SIGKILL)
    killed.process.wait()
    assert left.exists()
    start()
    eventually(lambda: not left.exists(), "the end of what was left")
    assert used.exists()
    other.stop()
    assert not used.exists()
