"""Intended differences between the responses of conch and Triton 2.51.

Every entry has a reason.  conch's response is still checked: ``status`` (HTTP) or ``code`` (gRPC) and ``error``, a
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
    "content type of nothing": "An empty body has no type, so what its header says may differ.",
    "duplicate keys": "Triton repeats keys of a JSON object (parameters of ensembles); conch sends each key once.",
    "order of outputs": "Triton lists the outputs of an ensemble in the order of a hash table.",
    "order of names in messages": "Triton lists inputs in the order of a hash table when there are too many.",
    "place of a JSON error": "conch describes an error in JSON, and its place, in the words of a different parser.",
    "server's version": "conch may state another version of the protocol, and adds its own version.",
    "while a model loads": "Triton opens no port until its models are loaded, and a model that is loaded later is "
    "NOT_FOUND until then; conch answers from the start, with UNAVAILABLE (503), so that clients try again.",
    "paths of the server": "Why a model does not load is answered with the last two parts of a path, and without the "
    "command that installs what is missing, which the server's log has; Triton sends whole paths.  The frames of a "
    "Python model's traceback, and where a backend was searched, are as Triton sends them.",
    "what a model runs with": "A model on one of conch's own backends has parameters that begin with 'conch.' in its "
    "configuration, and a member 'runs_with' in its statistics, except over gRPC, which has no field for it.",
    "unknown parameters": "conch's own backends refuse requests with parameters that they do not know, and backends "
    "that Triton has as well refuse misspelt ones; Triton ignores both.  Python models get them all.",
    "several texts": "On conch's own backends, the answer of generate has a value for each row; Triton flattens them.",
    "time of a running request": "The time-out of a request, where a model lets clients set one, holds in Triton's "
    "queue alone; in conch a request that runs past it is answered with UNAVAILABLE, and its model is told.",
    "batches made ahead": "Triton makes up to two batches per instance while all are busy; conch makes one when an "
    "instance is free, of all that waits then, so that one more important goes first however late it came, and one "
    "whose time is up does not run.",
    "rows without a request": "The rows of a direct sequence batch that have no request hold zeros in conch; Triton "
    "promises only that they are marked as not ready.",
    "idle sequences": "Triton counts the idle time of a sequence from the arrival of its last request, conch from the "
    "end of it.",
    "sequences of a dead worker": "They end with an error that says so, and their ids may start again; Triton's "
    "scheduler does not know what became of the process and keeps them.",
    "sequences with a cancelled request": "A request that waits and is cancelled ends its sequence, and those that "
    "wait behind it are CANCELLED.  Whoever goes on with that sequence is told at once that it has to start; in Triton "
    "that is CANCELLED too until the requests under way have been answered.",
    "libraries of backends": "conch cannot run a backend's library and says so with INVALID_ARG; Triton tries, and "
    "says NOT_FOUND of one that cannot be loaded.",
    "instances that come and go": "Triton starts all instances of a version anew if anything in its directory has "
    "changed, and what Python writes into __pycache__ at the first load is such a change; conch does not count that "
    "folder, so that the instances that stay run on.",
    "ensembles of members that failed": "When a member is loaded that could not be loaded before, Triton loads the "
    "ensembles that had failed because of it; in conch they are loaded when they are asked for.  Ensembles that have "
    "served and lost a member come back with it in both.",
    "runs of an iterative sequence": "Triton counts each run of a request as an inference and a success of its "
    "own; conch counts a request once, and its runs as executions.",
    "extensions": "conch lists only the extensions that work in it, and one of its own.",
}

_JSON = "the JSON parser's own words"
_TOO_LARGE = "the shape's byte size is checked for overflow, as in newer releases; 2.51 crashes"

_MAPPED = "an error in execute has the status that belongs to its code, as with infer; 2.51 always says 400"

_MODE = "conch says which mode the server has, where nothing polls"
_NOT_EXPLICIT = (
    r"explicit model load / unload is not allowed if polling is enabled; this server runs with "
    r"--model-control-mode=none: start it with explicit"
)

_NO_INPUT = "a list or an object can only be meant for an input, so conch adds that the model does not have it"
_BAD_TYPE = (
    r"parameter '{0}' has invalid type. It should be either 'int', 'bool', or 'string'. Model 'generate' has no "
    r"input '{0}', only 'PROMPT', 'STREAM'"
)

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
        "2.51 crashes with a division by zero; the text is that for other types without classification",
        400,
        r"class result not available for output due to unsupported type 'BYTES'",
        ask_triton=False,
    ),
    "too few elements": Difference(
        "the text of newer releases", 500, r"Failed to parse 'data' field: shape does not match true shape"
    ),
    "output twice": Difference(
        "refused, as in newer releases", 400, r"\[request id: <id_unknown>\] output 'OUTPUT0' already exists in request"
    ),
    "fault nothing": Difference(
        "2.51 never answers when execute of a non-decoupled model returns None and nothing is sent",
        500,
        r"The model dropped the request without sending a response\.",
        ask_triton=False,
    ),
    "wrong correlation type": Difference(
        "refused, as in newer releases; 2.51 gives the model bytes of the text as a number",
        400,
        r"\[request id: <id_unknown>\] sequence batching control 'CORRID' data-type is 'BYTES', but model 'accumulate' "
        r"expects 'UINT64'",
    ),
    "fault reschedule": Difference(
        "2.51 logs this and never answers",
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
        "conch names the input as the model does, Triton calls it raw_input",
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
    "gzip of nonsense": Difference("2.51 treats what cannot be decompressed as an empty body", 400, r".+"),
    "deflate of nonsense": Difference("2.51 treats what cannot be decompressed as an empty body", 400, r".+"),
    "gzip cut": Difference("2.51 carries on with what it could decompress", 400, r".+"),
    "index ready text": Difference(
        "the status and the text of newer releases", 400, r"Invalid value for 'ready': expected a boolean"
    ),
    "ensemble one output": Difference(
        "2.51 fails with a deadlock error when the output asked for also feeds a step that is not needed",
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
            "conch names the field that does not belong to the datatype",
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
