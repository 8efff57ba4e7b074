"""A gRPC server whose behaviour is known: it repeats each message, in a stream as often as requested."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import sleep
from typing import Any

import grpc
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc


@dataclass
class KnownGrpcServer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Answers with its inputs: ``responses`` times in a stream, ``distance`` seconds apart, for a decoupled model.

    Every ``fails``-th request is refused (0: none), in a stream with ``error_message`` after its first response, and
    with responses after it. ``requests`` are those that came, ``streams`` counts calls that stay open, ``metadata``
    is that of calls. ``datatype`` is that of its input.
    """

    decoupled: bool = False
    responses: int = 1
    distance: float = 0.0
    fails: int = 0
    datatype: str = "INT32"
    port: int = 0
    streams: int = 0
    requests: list[Any] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)

    def ServerMetadata(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerMetadataResponse(name="known")

    def ModelMetadata(self, request: Any, context: Any) -> Any:
        tensor = service_pb2.ModelMetadataResponse.TensorMetadata
        return service_pb2.ModelMetadataResponse(
            name="known", inputs=[tensor(name="IN", datatype=self.datatype, shape=[1])],
            outputs=[tensor(name="IN", datatype="INT32", shape=[1])],
        )  # fmt: skip

    def ModelConfig(self, request: Any, context: Any) -> Any:
        policy = model_config_pb2.ModelTransactionPolicy(decoupled=self.decoupled)
        return service_pb2.ModelConfigResponse(
            config=model_config_pb2.ModelConfig(name="known", model_transaction_policy=policy)
        )

    def ModelStatistics(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelStatisticsResponse()

    def ModelInfer(self, request: Any, context: Any) -> Any:
        self._note(request, context)
        return _answer(request)

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        self.streams += 1
        for request in requests:
            self._note(request, context)
            failed = self.fails and len(self.requests) % self.fails == 0
            for number in range(self.responses):
                if number:
                    sleep(self.distance)
                if failed and number == min(1, self.responses - 1):
                    said = service_pb2.ModelInferResponse(id=request.id)
                    yield service_pb2.ModelStreamInferResponse(error_message="it is its turn", infer_response=said)
                    if not self.decoupled:
                        break
                yield service_pb2.ModelStreamInferResponse(infer_response=_answer(request))
            if self.decoupled:
                last = service_pb2.ModelInferResponse(id=request.id)
                last.parameters["triton_final_response"].bool_param = True
                yield service_pb2.ModelStreamInferResponse(infer_response=last)

    def _note(self, request: Any, context: Any) -> None:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))


def _answer(request: Any) -> Any:
    response = service_pb2.ModelInferResponse(model_name="known", id=request.id)
    response.outputs.add(name="IN", datatype="INT32", shape=[1])
    response.raw_output_contents.append(request.raw_input_contents[0])
    return response


@contextmanager
def running_grpc(
    server: KnownGrpcServer, credentials: grpc.ServerCredentials | None = None
) -> Iterator[KnownGrpcServer]:
    """The server on a free port of this machine."""
    listener = grpc.server(ThreadPoolExecutor(8))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(server, listener)
    where = "127.0.0.1:0"
    secure = credentials is not None
    server.port = listener.add_secure_port(where, credentials) if secure else listener.add_insecure_port(where)
    listener.start()
    try:
        yield server
    finally:
        listener.stop(None).wait(60)
