"""Several texts in one body of ``POST …/generate``: each becomes a request, for models that take one per request.

Called by the HTTP front end, like ``generate.py``. Triton refuses such a body, because a list does not fit a tensor of
one element. Does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from conch.core.errors import invalid
from conch.core.inference import InferRequest, InferResponse, ModelSignature
from conch.wire.json import tensor as tensor_data
from conch.wire.json import text
from conch.wire.json.generate import decode_document

#: Maximum number of texts in a body.
MOST_TEXTS: Final = 256
#: Maximum number of members in a body with several texts, each of which is repeated for every text.
MOST_MEMBERS: Final = 1000


def decode_texts(
    document: Mapping[str, Any],
    signature: ModelSignature,
    on_response: Callable[[int], Callable[[InferResponse], None]],
    max_input_size: int,
) -> list[InferRequest] | None:
    """Return a request for each text; None if no input of one element is given as a list.

    ``on_response`` returns the response callback of a text by its number. Raises the errors of ``split_texts`` and
    ``decode_document``, and INVALID_ARG for more than ``max_input_size`` bytes in total.
    """
    documents = split_texts(document, signature)
    if documents is None:
        return None
    requests: list[InferRequest] = []
    size = 0
    for index, single in enumerate(documents):
        request, _ = decode_document(single, signature, on_response(index), max_input_size=max_input_size)
        requests.append(request)
        size += sum(len(tensor.data) for tensor in request.inputs.values())
        if size > max_input_size:
            raise invalid(
                f"the requests of {index + 1} texts have {size} bytes, which exceeds the maximum allowed input size"
                f" of {max_input_size} bytes. Use --http-max-input-size to increase the limit."
            )
    return requests


def split_texts(document: Mapping[str, Any], signature: ModelSignature) -> list[dict[str, Any]] | None:
    """Return the body for each text of ``document``; None if no input of one element is given as a list.

    Single values apply to all texts. Raises INVALID_ARG for lists of different lengths, empty lists and too many texts.
    """
    listed = {
        name: value
        for name, value in document.items()
        if type(value) is list and (spec := signature.inputs.get(name)) is not None and spec.dims == (1,)
    }
    if not listed:
        return None
    lengths = {name: len(values) for name, values in listed.items()}
    first, count = next(iter(lengths.items()))
    for name, length in lengths.items():
        if length != count:
            raise invalid(
                f"'{first}' is a list of {count} and '{name}' one of {length}: each has a value for each text"
            )
    if not 0 < count <= MOST_TEXTS:
        raise invalid(f"'{first}' is a list of {count}; a request may have 1 to {MOST_TEXTS} texts")
    if len(document) > MOST_MEMBERS:
        raise invalid(f"a request for several texts has {len(document)} members; at most {MOST_MEMBERS} are allowed")
    return [{**document, **{name: values[index] for name, values in listed.items()}} for index in range(count)]


def encode_texts(requests: Sequence[InferRequest], responses: Sequence[InferResponse]) -> bytes:
    """Encode one JSON object with a list for each output and parameter: the value for each text, null if missing.

    Raises INVALID_ARG for outputs that JSON cannot carry.
    """
    request = requests[0]
    document: dict[str, Any] = {"model_name": request.model_name, "model_version": str(request.model_version)}
    if request.id:
        document["id"] = request.id
    lists: dict[str, list[Any]] = {}
    for index, response in enumerate(responses):
        for name, value in _values(response).items():
            lists.setdefault(name, [None] * len(responses))[index] = value
    return text.dumps({**document, **lists}, sort=True)


def _values(response: InferResponse) -> dict[str, Any]:
    values = {name: text.numbers(value) for name, value in response.parameters.items()}
    for tensor in response.outputs:
        elements = tensor_data.to_json(tensor)
        values[tensor.name] = text.numbers(elements[0] if len(elements) == 1 else elements)
    return values
