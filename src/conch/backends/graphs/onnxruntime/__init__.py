"""The backend ``onnxruntime``: an ONNX graph, tensors in and tensors out."""
