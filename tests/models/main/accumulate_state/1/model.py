"""Sums the inputs of each sequence in a state that the server keeps."""

import triton_python_backend_utils as pb_utils


def value(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            total = value(request, "STATE_IN") + value(request, "INPUT")
            responses.append(
                pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", total), pb_utils.Tensor("STATE_OUT", total)])
            )
        return responses
