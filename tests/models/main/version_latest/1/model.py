"""Says what it was initialized with and where it is, as JSON."""

import json
import sys

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.args = dict(args)

    def execute(self, requests):
        facts = {
            "args": self.args,
            "types": sorted({type(value).__name__ for value in self.args.values()}),
            "model_dir": pb_utils.get_model_dir(),
            "module": __name__,
            "path": sys.path,
        }
        output = pb_utils.Tensor("FACTS", np.array([json.dumps(facts)], np.object_))
        return [pb_utils.InferenceResponse([output]) for _ in requests]
