"""``conch request``: writes the body of an inference request to a file, and the ``curl`` line that sends it.

The body is the protocol's JSON with the texts as binary data behind it, so that any text can be sent unchanged.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

import click

from conch.cli.completion import models
from conch.client.client import Client
from conch.config.pbtxt import parse
from conch.core.errors import ConchError, invalid, not_found, unavailable
from conch.core.tensors import pack_bytes
from conch.repository.names import check_model_name

HEADER: Final = "Inference-Header-Content-Length"
_SECONDS: Final = 10


@dataclass(frozen=True, slots=True)
class Input:
    """A text input of a model; ``shape`` includes the batch dimension, with -1 for variable dimensions."""

    name: str
    shape: tuple[int, ...]


@click.command("request")
@click.argument("model", shell_complete=models)
@click.argument("texts", nargs=-1, metavar="[TEXT]…")
@click.option("-i", "--input", "named", multiple=True, metavar="NAME=TEXT", help="A text for the input of that name.")
@click.option("-r", "--model-repository", "repository", default=Path("models"), show_default=True,
              type=click.Path(file_okay=False, path_type=Path), help="Repository with the model.")  # fmt: skip
@click.option("--url", default="", help="Read the model's inputs from a running server, such as http://localhost:8000.")
@click.option("-o", "--output", default=Path("query_body.bin"), show_default=True,
              type=click.Path(dir_okay=False, path_type=Path), help="File to write the body to.")  # fmt: skip
def request_command(
    model: str, texts: tuple[str, ...], named: tuple[str, ...], repository: Path, url: str, output: Path
) -> None:
    """Write the body of a request to MODEL to a file, and print the curl command that sends it."""
    check_model_name(model)
    inputs = _inputs_of_server(url, model) if url else _read(repository, model)
    header, data = body(model, inputs, texts, _named(named))
    output.write_bytes(header + data)
    address = f"{(url or 'http://localhost:8000').rstrip('/')}/v2/models/{quote(model, safe='')}/infer"
    click.echo(
        f"curl -X POST {shlex.quote(address)} \\\n  --data-binary {shlex.quote(f'@{output}')} \\\n"
        f"  --header {shlex.quote(f'{HEADER}: {len(header)}')}"
    )


def body(
    model: str, inputs: Sequence[Input], texts: Sequence[str], named: Mapping[str, Sequence[str]]
) -> tuple[bytes, bytes]:
    """Return the JSON and the binary data of a request; ``texts`` go to the first input that is not in ``named``.

    Raises INVALID_ARG for an input without texts, or with too many for its shape.
    """
    texts_of = dict(named)
    known = [tensor.name for tensor in inputs]
    for name in texts_of:
        if name not in known:
            raise invalid(
                f"model '{model}' has no input '{name}' that takes texts; it has {', '.join(known) or 'none'}"
            )
    if texts:
        free = next((name for name in known if name not in texts_of), None)
        if free is None:
            raise invalid(f"model '{model}' has no input left for '{texts[0]}'")
        texts_of[free] = texts
    if not texts_of:
        raise invalid("at least one text is required")
    tensors, data = [], b""
    for tensor in inputs:
        if tensor.name not in texts_of:
            continue
        packed = pack_bytes([os.fsencode(text) for text in texts_of[tensor.name]])
        tensors.append({
            "name": tensor.name,
            "shape": shape_of(tensor, len(texts_of[tensor.name])),
            "datatype": "BYTES",
            "parameters": {"binary_data_size": len(packed)},
        })  # fmt: skip
        data += packed
    return json.dumps({"inputs": tensors}, separators=(",", ":")).encode(), data


def shape_of(tensor: Input, count: int) -> list[int]:
    """Return the shape of ``count`` texts, all in the first variable dimension."""
    shape = list(tensor.shape)
    if -1 in shape:
        shape[shape.index(-1)] = count
    shape = [1 if size == -1 else size for size in shape]
    elements = 1
    for size in shape:
        elements *= size
    if elements != count:
        raise invalid(f"input '{tensor.name}' of shape {list(tensor.shape)} cannot hold {count} texts")
    return shape


def _named(pairs: Sequence[str]) -> dict[str, list[str]]:
    texts_of: dict[str, list[str]] = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not separator:
            raise invalid(f"--input '{pair}' must be NAME=TEXT")
        texts_of.setdefault(name, []).append(text)
    return texts_of


def _read(repository: Path, model: str) -> list[Input]:
    """Return the inputs in the model's configuration. Raises NOT_FOUND without a file, INVALID_ARG without inputs."""
    path = repository / model / "config.pbtxt"
    try:
        config = parse(path.read_text(encoding="utf-8"), str(path))
    except OSError:
        raise not_found(
            f"{path} cannot be read: set --model-repository to the model's repository, or set --url"
        ) from None
    if not config.input:
        raise invalid(
            f"{path} declares no inputs, because they are completed at load: set --url to a server that runs the model"
        )
    batch = (-1,) if config.max_batch_size > 0 else ()
    text = type(config.input[0]).DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_name["TYPE_STRING"].number
    return [Input(tensor.name, (*batch, *tensor.dims)) for tensor in config.input if tensor.data_type == text]


def _inputs_of_server(url: str, model: str) -> list[Input]:
    """Return the inputs of the model on a running server. Raises UNAVAILABLE if it does not respond."""
    address = f"{url.rstrip('/')}/v2/models/{model}"
    if not address.startswith(("http://", "https://")):
        raise invalid(f"--url '{url}' must begin with http:// or https://")
    try:
        with Client(url) as client:
            metadata = client.metadata(model, timeout=_SECONDS)
        return [
            Input(tensor["name"], tuple(map(int, tensor["shape"])))
            for tensor in metadata["inputs"]
            if tensor["datatype"] == "BYTES"
        ]
    except (ConchError, ValueError, KeyError, TypeError) as error:
        raise unavailable(f"{address} does not describe the model's inputs: {error}") from None
