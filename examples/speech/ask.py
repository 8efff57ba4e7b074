"""Transcribe a recording: python ask.py FILE [--url HOST:PORT]."""

import argparse
import json
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpcclient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="a WAV, FLAC, OGG, MP3, M4A, WebM or AAC file")
    parser.add_argument("--url", default="localhost:8001", help="gRPC address of the server")
    arguments = parser.parse_args()

    client = grpcclient.InferenceServerClient(arguments.url)
    inputs = [value("audio", arguments.file.read_bytes()), value("return_timestamps", b"segment")]
    result = client.infer("whisper", inputs)
    print(result.as_numpy("text_output").item().decode())
    for chunk in json.loads(result.as_numpy("chunks").item()):
        print(f"{chunk['start']:7.2f} s  {chunk['text']}")


def value(name: str, content: bytes) -> grpcclient.InferInput:
    """An input of one row with one element."""
    tensor = grpcclient.InferInput(name, [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[content]], np.object_))
    return tensor


if __name__ == "__main__":
    main()
