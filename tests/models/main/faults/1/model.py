"""Fails on request: MODE is ``ok``, a name of a TritonError code, ``none``, or a way to break execute's contract."""

import numpy as np
import triton_python_backend_utils as pb_utils


def respond(mode):
    if mode == "default":
        return pb_utils.InferenceResponse(error=pb_utils.TritonError("default fails"))
    if mode == "with_outputs":
        output = pb_utils.Tensor("OUTPUT", np.array([["lost"]], dtype=np.object_))
        return pb_utils.InferenceResponse([output], error=pb_utils.TritonError("outputs are dropped"))
    if mode == "undeclared":
        return pb_utils.InferenceResponse([pb_utils.Tensor("OTHER", np.zeros((1, 1), np.float32))])
    if mode == "no_outputs":
        return pb_utils.InferenceResponse([])
    if mode.isupper():
        return pb_utils.InferenceResponse(
            error=pb_utils.TritonError(mode + " fails", getattr(pb_utils.TritonError, mode))
        )
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.array([[mode]], dtype=np.object_))])


class TritonPythonModel:
    def execute(self, requests):
        modes = [pb_utils.get_input_tensor_by_name(r, "MODE").as_numpy().flatten()[0].decode() for r in requests]
        if "raise" in modes:
            raise ValueError("execute raises")
        if "raise_triton" in modes:
            raise pb_utils.TritonModelException("execute raises its own")
        if "not_list" in modes:
            return "a string"
        if "not_response" in modes:
            return [42 for _ in requests]
        if "too_few" in modes:
            return []
        if "too_many" in modes:
            return [respond("ok") for _ in requests] + [respond("ok")]
        for request, mode in zip(requests, modes, strict=True):
            if mode.startswith("reschedule"):
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        if "nothing" in modes:
            return None
        if "none" in modes or "reschedule" in modes:
            return [None for _ in requests]
        return [respond(mode) for mode in modes]
