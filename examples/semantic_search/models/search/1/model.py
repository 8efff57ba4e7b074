"""Finds the documents that are closest in meaning to each query: ``embedder`` by BLS, an index of FAISS behind it."""

import json
from pathlib import Path

import faiss
import numpy as np
import triton_python_backend_utils as pb_utils

HITS = 3


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.embedder = config["parameters"]["embedder"]["string_value"]
        folder = Path(args["model_repository"], args["model_version"])
        self.documents = (folder / "documents.txt").read_text().splitlines()
        self.index = None  # ``embedder`` may be loaded after this model, so the first request builds it

    def execute(self, requests):
        if self.index is None:
            vectors = self.embed([document.encode() for document in self.documents])
            self.index = faiss.IndexFlatIP(vectors.shape[1])
            self.index.add(vectors)
        queries = [pb_utils.get_input_tensor_by_name(request, "query").as_numpy() for request in requests]
        similarities, found = self.index.search(self.embed(np.concatenate(queries).ravel()), HITS)
        responses, row = [], 0
        for query in queries:
            rows = slice(row, row := row + len(query))
            documents = [[self.documents[number].encode() for number in hits] for hits in found[rows]]
            outputs = [
                pb_utils.Tensor("document", np.array(documents, np.object_)),
                pb_utils.Tensor("similarity", similarities[rows]),
            ]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses

    def embed(self, texts):
        """Vectors of length 1, FP32 [texts, dimension]."""
        tensor = pb_utils.Tensor("text_input", np.array([[text] for text in texts], np.object_))
        request = pb_utils.InferenceRequest(
            model_name=self.embedder, requested_output_names=["embedding"], inputs=[tensor]
        )
        response = request.exec()
        if response.has_error():
            raise pb_utils.TritonModelException(response.error().message())
        return pb_utils.get_output_tensor_by_name(response, "embedding").as_numpy()
