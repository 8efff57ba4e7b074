"""Identity, and how many requests the execute call had."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
            count = np.full((len(value), 1), len(requests), np.int32)
            responses.append(
                pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", value), pb_utils.Tensor("REQUESTS", count)])
            )
        return responses
