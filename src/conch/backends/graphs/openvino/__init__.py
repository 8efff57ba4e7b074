"""The backend ``openvino``: an OpenVINO or ONNX graph, tensors in and tensors out."""
