"""Intended differences between the responses of conch and Triton 2.51.

Every entry has a reason. conch's response is still checked: ``status`` (HTTP) or ``code`` (gRPC) and ``error``, a
regular expression for the whole message.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """conch's response to one case of the differential tests; ``None`` fields must be equal to Triton's.

    With ``ask_triton`` false, the case is not sent to Triton, because it would crash.
    """

    reason: str
    status: int | None = None
    error: str | None = None
    code: str | None = None
    ask_triton: bool = True


#: Rules for every HTTP case.
GENERAL = {
    "content type of errors": "Triton sends some error bodies as text/plain; conch sends all as application/json.",
    "content type of nothing": "The content type of an empty body may differ.",
    "duplicate keys": "Triton may repeat a key of a JSON object (parameters of ensembles); conch sends each key once.",
    "order of outputs": "Triton lists the outputs of an ensemble in the order of a hash table.",
    "order of names in messages": "If there are too many inputs, Triton lists them in the order of a hash table.",
    "place of a JSON error": "The JSON parsers of the two servers word errors and their positions differently.",
    "server's version": "conch may report another version of the protocol, and adds its own version.",
    "while a model loads": "Triton opens no port until its models are loaded, and reports NOT_FOUND for a model that "
    "is loading later. conch responds from the start, with UNAVAILABLE (503), so that clients retry.",
    "paths of the server": "Triton's load errors contain whole paths. conch's contain the last two parts of a path, "
    "and omit the command that installs a missing package, which is in the server's log. Tracebacks of Python models "
    "and the searched locations of backends are the same in both.",
    "what a model runs with": "The configuration of a model on a built-in backend has parameters that begin with "
    "'conch.', and its statistics have a member 'runs_with', except over gRPC, which has no field for it.",
    "unknown parameters": "conch's own backends refuse requests with unknown parameters, and backends that Triton "
    "also has refuse misspelt ones; Triton ignores both. Python models receive all parameters.",
    "several texts": "On conch's own backends, a response of generate has one value per row; Triton returns a flat "
    "list.",
    "time of a running request": "If a model lets clients set a timeout, Triton applies it only in the queue. In "
    "conch, it also applies while the request runs: the request fails with UNAVAILABLE, and the model is notified.",
    "batches made ahead": "Triton forms up to two batches per instance while all instances are busy. conch forms a "
    "batch when an instance is free, from all waiting requests. A late request of higher priority therefore runs "
    "first, and a request whose timeout has expired does not run.",
    "rows without a request": "In a direct sequence batch, rows without a request contain zeros in conch; Triton only "
    "guarantees that they are marked as not ready.",
    "idle sequences": "Triton measures the idle time of a sequence from the arrival of its last request, conch from "
    "the end of that request.",
    "sequences of a dead worker": "Sequences of a dead worker end with an error, and their correlation IDs can be "
    "used again; Triton keeps the sequences.",
    "sequences with a cancelled request": "A waiting request that is cancelled ends its sequence; later waiting "
    "requests of the sequence fail with CANCELLED. Further requests are refused immediately until the sequence is "
    "started again; in Triton, they also fail with CANCELLED until the in-flight requests have completed.",
    "libraries of backends": "conch cannot run a backend's library and reports INVALID_ARG; Triton tries to load it "
    "and reports NOT_FOUND if that fails.",
    "instances that come and go": "Triton restarts all instances of a version if its directory has changed, including "
    "the __pycache__ that Python writes during the first load. conch ignores that folder, so unchanged instances keep "
    "running.",
    "ensembles of members that failed": "When a model that had failed to load is loaded, Triton also loads the "
    "ensembles that had failed because of it; conch loads them on request. If an ensemble became unavailable because "
    "a step's model was unloaded, both servers load it again with that model.",
    "runs of an iterative sequence": "Triton counts each run of a request as an inference and a success; conch counts "
    "a request once, and its runs as executions.",
    "extensions": "conch lists only the extensions that it supports, and one of its own.",
}

_JSON = "the wording of the JSON parser"
_TOO_LARGE = "the shape's byte size is checked for overflow, as in newer releases; 2.51 crashes"

_MAPPED = "an error in execute has the status of its code, as with infer; 2.51 always returns 400"

_MODE = "the message of conch names the model control mode, because this server does not poll"
_NOT_EXPLICIT = (
    r"explicit model load / unload is not allowed if polling is enabled; this server runs with "
    r"--model-control-mode=none: start it with explicit"
)

_NO_INPUT = "only an input can be a list or an object, so conch adds that the model has no such input"
_BAD_TYPE = (
    r"parameter '{0}' has invalid type. It should be either 'int', 'bool', or 'string'. Model 'generate' has no "
    r"input '{0}', only 'PROMPT', 'STREAM'"
)
_NO_NAME = "conch adds the name of the input with the wrong elements"
_STRING = r"Unable to parse JSON bytes array: attempt to access JSON non-string as string \(input 'PROMPT'\)"
_WRONG_ELEMENTS = {
    "generate number for string": _STRING,
    "generate null for string": _STRING,
    "generate object for string": _STRING,
    "generate bool input wrong": r"Unable to parse 'data': attempt to access JSON non-boolean as boolean "
    r"\(input 'STREAM'\)",
    "generate float for int": r"Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer "
    r"\(input 'A'\)",
    "generate shape nested": r"Unable to parse 'data': Shape does not match true shape of 'data' field "
    r"\(input 'B'\)",
}

HTTP: dict[str, Difference] = {
    case: Difference(_MODE, 503, _NOT_EXPLICIT)
    for case in (
        "load when not explicit", "unload when not explicit", "load unknown when not explicit", "unload bad parameter",
    )
} | {
    "generate parameter list": Difference(_NO_INPUT, 400, _BAD_TYPE.format("times")),
} | {
    case: Difference(_NO_INPUT, 400, f"Converting keyword: 'parameters': {_BAD_TYPE.format(name)}")
    for case, name in (("generate nested bad parameter", "a"), ("generate deeper parameters", "parameters"))
} | {
    case: Difference(_NO_NAME, 500, error) for case, error in _WRONG_ELEMENTS.items()
} | {
    "shape too large": Difference(
        _TOO_LARGE,
        400,
        r"byte size overflow for input 'INPUT': element count \(4611686018427387904\) \* data type size \(4\) exceeds "
        r"maximum allowed size \(9223372036854775807\)",
        ask_triton=False,
    ),
    "shape overflows": Difference(
        "the shape's element count is checked for overflow, as in newer releases",
        400,
        r"invalid shape for input 'INPUT': shape \[1099511627776,1099511627776\] causes total element count to exceed "
        r"maximum size of 9223372036854775807",
    ),
    "classes of strings": Difference(
        "2.51 crashes with a division by zero; the message is that for other datatypes without classification",
        400,
        r"class result not available for output due to unsupported type 'BYTES'",
        ask_triton=False,
    ),
    "too few elements": Difference(
        "the message of newer releases", 500, r"Failed to parse 'data' field: shape does not match true shape"
    ),
    "output twice": Difference(
        "refused, as in newer releases", 400, r"\[request id: <id_unknown>\] output 'OUTPUT0' already exists in request"
    ),
    "fault nothing": Difference(
        "2.51 never responds if execute of a non-decoupled model returns None and sends no response",
        500,
        r"The model dropped the request without sending a response\.",
        ask_triton=False,
    ),
    "wrong correlation type": Difference(
        "refused, as in newer releases; 2.51 passes bytes of the text to the model as a number",
        400,
        r"\[request id: <id_unknown>\] sequence batching control 'CORRID' data-type is 'BYTES', but model 'accumulate' "
        r"expects 'UINT64'",
    ),
    "fault reschedule": Difference(
        "2.51 logs this and never responds",
        500,
        r"Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to "
        r"handle such a flag\.",
        ask_triton=False,
    ),
    "fault reschedule and more": Difference(
        "the class of a response is in another module",
        500,
        r"Failed to process the request\(s\) for model 'faults_0', message: Expected a None object in the execute "
        r"function return list for reschduled request, found type '<class 'conch\..*\.InferenceResponse'>'\.",
    ),
    "encoded path": Difference("tritonclient encodes model names, so conch decodes them", 200),
    "raw odd size": Difference(
        "conch uses the name of the model's input; Triton calls it raw_input",
        400,
        r"\[request id: <id_unknown>\] input byte size mismatch for input 'INPUT' for model 'identity_fp32'\. "
        r"Expected 4, got 5",
    ),
    "generate fails": Difference(_MAPPED, 503, "told to fail"),
    "generate faults": Difference(_MAPPED, 501, "UNSUPPORTED fails"),
    "stream fails at once": Difference(_MAPPED, 503),
    "stream non-decoupled fails": Difference(_MAPPED, 500),
    "header length not a number": Difference(
        "refused, as in newer releases; 2.51 reads it as 0, a raw request",
        400,
        r"Unable to parse Inference-Header-Content-Length, got: abc",
    ),
    "header length empty": Difference(
        "refused, as in newer releases; 2.51 reads it as 0, a raw request",
        400,
        r"Unable to parse Inference-Header-Content-Length, got: ",
    ),
    "header length beyond any int": Difference(
        "refused, as in newer releases",
        400,
        r"Unable to parse Inference-Header-Content-Length, value is out of range \[ -2147483648, 2147483647 \], got: "
        r"99999999999",
    ),
    "gzip of nonsense": Difference("2.51 treats an invalid compressed body as empty", 400, r".+"),
    "deflate of nonsense": Difference("2.51 treats an invalid compressed body as empty", 400, r".+"),
    "gzip cut": Difference("2.51 uses the part of the body that it could decompress", 400, r".+"),
    "index ready text": Difference(
        "the status and message of newer releases", 400, r"Invalid value for 'ready': expected a boolean"
    ),
    "ensemble one output": Difference(
        "2.51 fails with a deadlock error if the requested output is also an input of an unneeded step",
        200,
    ),
    **{
        f"shm {case}": Difference(
            "clients' shared memory needs --allow-client-shm=true, as in newer releases",
            501,
            r"Client shared memory is disabled\. Start the server with '--allow-client-shm=true' to enable\.",
        )
        for case in (
            "unregister all", "unregister unknown", "register without key", "register without size",
            "register without region", "register absent",
        )
    },
    **{
        f"cuda {case}": Difference(
            "clients' shared memory needs --allow-client-shm=true, as in newer releases",
            501,
            r"Client shared memory is disabled\. Start the server with '--allow-client-shm=true' to enable\.",
        )
        for case in ("register without handle", "unregister all")
    },
}  # fmt: skip

GRPC: dict[str, Difference] = (
    {
        case: Difference(_MODE, code="UNAVAILABLE", error=_NOT_EXPLICIT)
        for case in ("load when not explicit", "unload when not explicit")
    }
    | {
        "contents of two types": Difference(
            "conch names the field that does not match the datatype",
            code="INVALID_ARGUMENT",
            error=r"unexpected explicit tensor data for input tensor 'IN_INT32' for model 'types' of type 'INT64', "
            r"expected datatype 'INT32'",
        ),
    }
    | {
        case: Difference(
            "clients' shared memory needs --allow-client-shm=true, as in newer releases",
            code="UNIMPLEMENTED",
            error=r"Client shared memory is disabled\. Start the server with '--allow-client-shm=true' to enable\.",
        )
        for case in ("shared memory unregister", "shared memory register")
    }
)
