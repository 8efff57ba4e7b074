"""A model without a configuration file."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        auto_complete_model_config.add_input({"name": "INPUT", "data_type": "TYPE_INT64", "dims": [-1]})
        auto_complete_model_config.add_output({"name": "OUTPUT", "data_type": "TYPE_INT64", "dims": [-1]})
        auto_complete_model_config.set_max_batch_size(0)
        return auto_complete_model_config

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", r.inputs()[0].as_numpy() + 1)]) for r in requests]
