"""The backend ``onnxruntime``: runs an ONNX graph, tensors in, tensors out."""
