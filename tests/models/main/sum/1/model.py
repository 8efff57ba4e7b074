"""C = A + B, or A where there is no B."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            total = pb_utils.get_input_tensor_by_name(request, "A").as_numpy()
            b = pb_utils.get_input_tensor_by_name(request, "B")
            if b is not None:
                total = total + b.as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("C", total)]))
        return responses
