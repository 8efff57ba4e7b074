"""Name what is in a picture: python ask.py FILE [--top-k N] [--url HOST:PORT]."""

import argparse
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpcclient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="a PNG, JPEG, WebP, GIF or BMP file")
    parser.add_argument("--top-k", type=int, default=3)
    parser.add_argument("--url", default="localhost:8001", help="gRPC address of the server")
    arguments = parser.parse_args()

    image = grpcclient.InferInput("image", [1, 1], "BYTES")
    image.set_data_from_numpy(np.array([[arguments.file.read_bytes()]], np.object_))
    top_k = grpcclient.InferInput("top_k", [1, 1], "INT32")
    top_k.set_data_from_numpy(np.array([[arguments.top_k]], np.int32))
    result = grpcclient.InferenceServerClient(arguments.url).infer("vit", [image, top_k])
    for label, score in zip(result.as_numpy("label")[0], result.as_numpy("score")[0], strict=True):
        print(f"{score:7.4f}  {label.decode()}")


if __name__ == "__main__":
    main()
