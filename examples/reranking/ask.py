"""Sort a few documents by how well they answer a question: python ask.py [QUERY] [--url HOST:PORT]."""

import argparse

import numpy as np
import tritonclient.grpc as grpcclient

DOCUMENTS = [
    "Books are returned at the desk on the ground floor, or in the box beside the entrance.",
    "The library was built in 1904 and has two reading rooms.",
    "Return tickets cost less than two single ones.",
    "A card for the library is free for residents.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("query", nargs="?", default="Where can I return a book?")
    parser.add_argument("--url", default="localhost:8001", help="gRPC address of the server")
    arguments = parser.parse_args()

    client = grpcclient.InferenceServerClient(arguments.url)
    inputs = [column("text_input", [arguments.query] * len(DOCUMENTS)), column("text_pair", DOCUMENTS)]
    scores = client.infer("reranker", inputs).as_numpy("score").ravel()
    for index in np.argsort(-scores):
        print(f"{scores[index]:8.4f}  {DOCUMENTS[index]}")


def column(name: str, texts: list[str]) -> grpcclient.InferInput:
    """An input of shape [rows, 1]."""
    tensor = grpcclient.InferInput(name, [len(texts), 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[text.encode()] for text in texts], np.object_))
    return tensor


if __name__ == "__main__":
    main()
