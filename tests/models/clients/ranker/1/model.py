"""The share of the words of the query that the document has."""

import numpy as np
import triton_python_backend_utils as pb_utils


def texts_of(request, name):
    return [row[0].decode().split() for row in pb_utils.get_input_tensor_by_name(request, name).as_numpy()]


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            pairs = zip(texts_of(request, "text_input"), texts_of(request, "text_pair"), strict=True)
            scores = [[len(set(query) & set(document)) / len(query)] for query, document in pairs]
            score = pb_utils.Tensor("score", np.array(scores, np.float32))
            responses.append(pb_utils.InferenceResponse([score]))
        return responses
