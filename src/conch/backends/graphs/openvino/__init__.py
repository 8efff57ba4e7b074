"""The backend ``openvino``: runs an OpenVINO or ONNX graph, tensors in, tensors out."""
