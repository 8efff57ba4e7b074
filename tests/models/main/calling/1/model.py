"""Calls other models: CASE names a function below, RESULT is its result as JSON."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import triton_python_backend_utils as pb_utils

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def raised(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


def request(model, outputs, more=None, **inputs):
    tensors = [pb_utils.Tensor(name, np.asarray(value)) for name, value in inputs.items()]
    return pb_utils.InferenceRequest(
        model_name=model, requested_output_names=outputs, inputs=tensors, request_id="inner", **(more or {})
    )


def floats(*values):
    return np.array([values], np.float32)


def ints(*values):
    return np.array(values, np.int32)


def strings(*values):
    return np.array(values, np.object_)


def outcome(response):
    """The outputs by name, or the error."""
    if response.has_error():
        return response.error().message()
    return {tensor.name(): decoded(tensor.as_numpy().tolist()) for tensor in response.output_tensors()}


def decoded(value):
    if isinstance(value, list):
        return [decoded(element) for element in value]
    return value.decode() if isinstance(value, bytes) else value


def echoed(response):
    return json.loads(response.output_tensors()[0].as_numpy()[0])


@case
def ensemble():
    return outcome(request("chain", ["Y"], X=floats(1, 2)).exec())


@case
def all_outputs():
    return sorted(outcome(request("echo_request", [], INPUT=strings("x")).exec()))


@case
def version():
    responses = [
        request("version_all", ["FACTS"], {"model_version": version}, INPUT=strings("x")).exec()
        for version in (1, 2, -1)
    ]
    return [echoed(response)["args"]["model_version"] for response in responses]


@case
def attributes():
    more = {"correlation_id": 7, "flags": 3, "timeout": 5_000_000, "parameters": {"a": 1, "b": True, "c": "d"}}
    return echoed(request("echo_request", ["REQUEST"], more, INPUT=strings("x")).exec())


@case
def correlation_text():
    more = {"correlation_id": "seven", "preferred_memory": pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU)}
    return echoed(request("echo_request", ["REQUEST"], more, INPUT=strings("x")).exec())["correlation_id"]


@case
def model_errors():
    responses = [request("faults", ["OUTPUT"], MODE=[strings(mode)]).exec() for mode in ("NOT_FOUND", "default", "ok")]
    return [outcome(response) for response in responses]


@case
def model_error_code():
    response = request("faults", ["OUTPUT"], MODE=[strings("NOT_FOUND")]).exec()
    return response.error().code() == pb_utils.TritonError.NOT_FOUND


@case
def model_raises():
    return outcome(request("faults", ["OUTPUT"], MODE=[strings("raise")]).exec()).split("\n")[0]


@case
def ensemble_error():
    return outcome(request("failing", ["OUTPUT"], MODE=[strings("default")]).exec())


@case
def refused():
    return [
        outcome(request("chain", ["Z"], X=floats(1)).exec()),
        outcome(request("chain", ["Y"], X=ints(1)).exec()),
        outcome(request("version_all", ["OUTPUT"], {"model_version": 77}, INPUT=strings("x")).exec()),
    ]


@case
def large():
    value = np.arange(1_000_000, dtype=np.float32).reshape(1, -1)
    result = request("plus_one", ["Y"], X=value).exec().output_tensors()[0].as_numpy()
    return [list(result.shape), float(result[0, 0]), float(result[0, -1]), bool((result == value + 1).all())]


@case
def text():
    values = strings("", "ä", "x" * 100_000)
    result = request("identity_string", ["OUTPUT"], TEXT=values.reshape(3, 1)).exec().output_tensors()[0].as_numpy()
    return [len(value.decode()) for value in result.flatten()]


@case
def empty_name():
    return raised(request, "chain", [""], X=floats(1))


@case
def threads():
    with ThreadPoolExecutor(8) as pool:
        requests = [request("plus_one", ["Y"], X=floats(number)) for number in range(64)]
        responses = list(pool.map(lambda one: one.exec(), requests))
    return [response.output_tensors()[0].as_numpy().flatten().tolist() for response in responses]


@case
def twice():
    one = request("plus_one", ["Y"], X=floats(4))
    return [outcome(one.exec()), outcome(one.exec())]


@case
def output_passed_on():
    first = request("plus_one", ["Y"], X=floats(4)).exec()
    value = pb_utils.Tensor.from_dlpack("X", pb_utils.get_output_tensor_by_name(first, "Y").to_dlpack())
    again = pb_utils.InferenceRequest(model_name="plus_one", requested_output_names=["Y"], inputs=[value]).exec()
    return outcome(again)


@case
def gathered():
    async def run():
        requests = [request("plus_one", ["Y"], X=floats(number)) for number in range(16)]
        return await asyncio.gather(*(one.async_exec() for one in requests))

    return [response.output_tensors()[0].as_numpy().flatten().tolist() for response in asyncio.run(run())]


@case
def gathered_decoupled():
    async def one(*values):
        responses = await request("repeat", ["OUT"], IN=ints(*values)).async_exec(decoupled=True)
        return [outcome(response) for response in responses]

    async def run():
        return await asyncio.gather(one(1, 2), one(), one(3, -1, 4))

    return asyncio.run(run())


@case
def async_without_loop():
    return raised(request("plus_one", ["Y"], X=floats(1)).async_exec)


@case
def decoupled_of_another():
    return [outcome(response) for response in request("plus_one", ["Y"], X=floats(1)).exec(decoupled=True)]


@case
def decoupled_with_final():
    return [outcome(response) for response in request("square", ["OUT"], IN=ints(3)).exec(decoupled=True)]


@case
def decoupled_again():
    responses = request("repeat", ["OUT"], IN=ints(5, 6)).exec(decoupled=True)
    first = outcome(next(responses))
    return [first, *([outcome(response) for response in responses] for _ in range(3))]


@case
def decoupled_unknown():
    return [outcome(response) for response in request("absent", ["OUT"], IN=ints(1)).exec(decoupled=True)]


@case
def decoupled_ensemble():
    """The end comes with the last response, or as an empty one if that had left before the member said it was the last."""
    outcomes = [outcome(response) for response in request("repeated", ["OUT"], IN=ints(1, 2)).exec(decoupled=True)]
    return outcomes[:-1] if outcomes[-1] == {} else outcomes


@case
def decoupled_abandoned():
    responses = request("repeat", ["OUT"], IN=ints(1, 2, 3)).exec(decoupled=True)
    return outcome(next(responses))


@case
def many_decoupled():
    responses = request("repeat", ["OUT"], IN=np.arange(500, dtype=np.int32)).exec(decoupled=True)
    return sum(response.output_tensors()[0].as_numpy()[0].item() for response in responses if response.output_tensors())


@case
def other_callers():
    """Models that call models themselves."""
    return [
        outcome(request("calling_async", ["RESULT"], X=ints(3)).exec()),
        [outcome(response) for response in request("calling_decoupled", ["OUT"], IN=ints(1, 2)).exec(decoupled=True)],
    ]


@case
def load_refused():
    return [
        raised(pb_utils.load_model, "plus_one"),
        raised(pb_utils.unload_model, "plus_one"),
        raised(pb_utils.load_model, "plus_one", files=["x"]),
    ]


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for received in requests:
            name = received.inputs()[0].as_numpy()[0].decode()
            output = pb_utils.Tensor("RESULT", np.array([json.dumps(CASES[name]())], np.object_))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
