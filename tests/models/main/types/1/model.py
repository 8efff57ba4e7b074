"""Identity for every datatype: each input given comes back as the output of the same type."""

import triton_python_backend_utils as pb_utils


def identity(tensor):
    name = tensor.name().replace("IN_", "OUT_")
    if tensor.name() == "IN_BF16":
        return pb_utils.Tensor.from_dlpack(name, tensor.to_dlpack())
    return pb_utils.Tensor(name, tensor.as_numpy())


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([identity(t) for t in r.inputs()]) for r in requests]
