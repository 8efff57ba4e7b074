"""What ``triton_python_backend_utils`` does: CASE names a function below, RESULT is its result as JSON."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def raised(call, *args, **kwargs):
    """The type and the text of what a call raises."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


@case
def tensor_accessors(model, request):
    tensor = pb_utils.Tensor("T", np.arange(6, dtype=np.int16).reshape(2, 3))
    return [tensor.name(), list(tensor.shape()), tensor.is_cpu(), tensor.as_numpy().tolist()]


@case
def tensor_of_objects(model, request):
    tensor = pb_utils.Tensor("T", np.array([["ä", b"b"], [1, None]], np.object_))
    return [list(tensor.shape()), [str(value) for value in tensor.as_numpy().flatten()]]


@case
def tensor_of_bytes(model, request):
    tensor = pb_utils.Tensor("T", np.array([b"a", b"bc"]))
    return [list(tensor.shape()), [str(value) for value in tensor.as_numpy()]]


@case
def tensor_of_unicode(model, request):
    return raised(pb_utils.Tensor, "T", np.array(["a"]))


@case
def input_strings_are_bytes(model, request):
    value = request.inputs()[0].as_numpy()
    return [str(value.dtype), type(value[0]).__name__]


@case
def tensor_not_contiguous(model, request):
    tensor = pb_utils.Tensor("T", np.arange(6, dtype=np.float32).reshape(2, 3).T)
    return [list(tensor.shape()), tensor.as_numpy().flatten().tolist()]


@case
def tensor_without_name(model, request):
    return raised(pb_utils.Tensor, "", np.zeros(1, np.float32))


@case
def tensor_of_unsupported_type(model, request):
    return raised(pb_utils.Tensor, "T", np.zeros(1, np.complex64))


@case
def dlpack_round_trip(model, request):
    tensor = pb_utils.Tensor("T", np.arange(4, dtype=np.float32).reshape(2, 2))
    again = pb_utils.Tensor.from_dlpack("U", tensor.to_dlpack())
    return [again.name(), list(again.shape()), again.as_numpy().tolist(), list(tensor.__dlpack_device__())]


@case
def dlpack_into_numpy(model, request):
    return np.from_dlpack(pb_utils.Tensor("T", np.arange(3, dtype=np.float32))).tolist()


@case
def dlpack_of_strings(model, request):
    return raised(pb_utils.Tensor("T", np.array(["a"], np.object_)).to_dlpack)


@case
def dlpack_not_contiguous(model, request):
    return raised(pb_utils.Tensor.from_dlpack, "T", np.arange(6, dtype=np.float32).reshape(2, 3).T)


@case
def type_conversions(model, request):
    return [
        [np.dtype(pb_utils.triton_to_numpy_type(n)).name for n in range(1, 14)],
        [
            int(pb_utils.numpy_to_triton_type(t))
            for t in (np.bool_, np.uint8, np.int64, np.float16, np.float32, np.object_)
        ],
        np.dtype(pb_utils.triton_string_to_numpy("TYPE_FP64")).name,
        np.dtype(pb_utils.triton_string_to_numpy("TYPE_STRING")).name,
        raised(pb_utils.triton_string_to_numpy, "TYPE_BF16"),
        sorted(pb_utils.TRITON_STRING_TO_NUMPY),
    ]


@case
def constants(model, request):
    return [
        pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
        pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
        pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
        pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL,
        pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
        int(pb_utils.TRITONSERVER_MEMORY_CPU),
        int(pb_utils.TRITONSERVER_MEMORY_GPU),
    ]


@case
def error_codes(model, request):
    names = [
        "UNKNOWN",
        "INTERNAL",
        "NOT_FOUND",
        "INVALID_ARG",
        "UNAVAILABLE",
        "UNSUPPORTED",
        "ALREADY_EXISTS",
        "CANCELLED",
    ]
    errors = [pb_utils.TritonError(name, getattr(pb_utils.TritonError, name)) for name in names]
    plain = pb_utils.TritonError("plain")
    return [
        [error.code() == getattr(pb_utils.TritonError, error.message()) for error in errors],
        plain.message(),
        plain.code() == pb_utils.TritonError.INTERNAL,
        issubclass(pb_utils.TritonModelException, Exception),
    ]


@case
def config_helpers(model, request):
    config = model.config
    return [
        pb_utils.get_input_config_by_name(config, "CASE"),
        pb_utils.get_input_config_by_name(config, "absent"),
        pb_utils.get_output_config_by_name(config, "RESULT")["data_type"],
        pb_utils.using_decoupled_model_transaction_policy(config),
    ]


@case
def tensors_by_name(model, request):
    response = pb_utils.InferenceResponse([pb_utils.Tensor("A", np.zeros(1, np.float32))])
    return [
        pb_utils.get_input_tensor_by_name(request, "CASE").name(),
        pb_utils.get_input_tensor_by_name(request, "absent") is None,
        pb_utils.get_output_tensor_by_name(response, "A").name(),
        pb_utils.get_output_tensor_by_name(response, "absent") is None,
    ]


@case
def byte_serialisation(model, request):
    serialised = pb_utils.serialize_byte_tensor(np.array([b"ab", "ä"], np.object_))
    data = serialised if isinstance(serialised, bytes) else serialised.item() if serialised.size else b""
    data = bytes(data)
    return [data.hex(), [v.decode() for v in pb_utils.deserialize_bytes_tensor(data)]]


@case
def request_built_by_hand(model, request):
    tensor = pb_utils.Tensor("I", np.zeros(1, np.float32))
    built = pb_utils.InferenceRequest(
        model_name="m",
        requested_output_names=["O"],
        inputs=[tensor],
        request_id="r",
        correlation_id="text",
        flags=1,
        timeout=5,
        parameters={"a": 1, "b": True, "c": "d"},
    )
    built.set_flags(2)
    return [
        built.request_id(),
        built.correlation_id(),
        built.flags(),
        built.timeout(),
        json.loads(built.parameters()),
        list(built.requested_output_names()),
        [t.name() for t in built.inputs()],
        hasattr(built, "model_name"),
    ]


@case
def request_refuses_bad_arguments(model, request):
    tensor = pb_utils.Tensor("I", np.zeros(1, np.float32))
    build = pb_utils.InferenceRequest
    good = {"model_name": "m", "requested_output_names": ["O"], "inputs": [tensor], "request_id": "r"}
    return [
        raised(build, **{**good, "correlation_id": 1.5}),
        raised(build, **{**good, "parameters": {1: 1}}),
        raised(build, **{**good, "parameters": {"a": [1]}}),
        raised(build, **{**good, "inputs": [None]}),
    ]


@case
def refused_arguments(model, request):
    """How many calls raise TypeError; what the others raise, its text if it is Triton's own."""
    tensor = pb_utils.Tensor("I", np.zeros(1, np.float32))
    good = {"inputs": [tensor], "requested_output_names": ["O"], "model_name": "m", "request_id": "r"}
    mine = pb_utils.InferenceRequest(**good)
    sender = request.get_response_sender()
    calls = {
        **{
            f"request {field} {value!r}": (pb_utils.InferenceRequest, (), {**good, field: value})
            for field, value in (
                ("inputs", None),
                ("inputs", [5]),
                ("requested_output_names", None),
                ("requested_output_names", {"O"}),
                ("requested_output_names", "O"),
                ("requested_output_names", [None]),
                ("requested_output_names", [""]),
                ("model_name", None),
                ("request_id", 5),
                ("correlation_id", None),
                ("correlation_id", -1),
                ("correlation_id", 1 << 64),
                ("model_version", "1"),
                ("flags", -1),
                ("flags", 1 << 32),
                ("timeout", -1),
                ("preferred_memory", None),
                ("preferred_memory", 5),
                ("trace", None),
                ("parameters", {"a": None}),
                ("nonsense", 1),
            )
        },
        "request of nothing": (pb_utils.InferenceRequest, (), {}),
        "request without a model": (pb_utils.InferenceRequest, (), {**good, "model_name": 1}),
        "flags": (mine.set_flags, (-1,), {}),
        "release flags": (mine.set_release_flags, ("x",), {}),
        "decoupled text": (mine.exec, ("x",), {}),
        "decoupled none": (mine.exec, (None,), {}),
        "memory": (pb_utils.PreferredMemory, (5,), {}),
        "device": (pb_utils.PreferredMemory, (pb_utils.TRITONSERVER_MEMORY_CPU, "x"), {}),
        "response of none": (pb_utils.InferenceResponse, (None,), {}),
        "response of numbers": (pb_utils.InferenceResponse, ([5],), {}),
        "response with a text as error": (pb_utils.InferenceResponse, ([], "error"), {}),
        "error of a number": (pb_utils.TritonError, (5,), {}),
        "error with a number as code": (pb_utils.TritonError, ("x", 5), {}),
        "tensor of a list": (pb_utils.Tensor, ("T", [1]), {}),
        "tensor without a name": (pb_utils.Tensor, (None, np.zeros(1)), {}),
        "dlpack of a number": (pb_utils.Tensor.from_dlpack, ("T", 5), {}),
        "dlpack without a name": (pb_utils.Tensor.from_dlpack, (1, np.zeros(1)), {}),
        "sent text": (sender.send, ("x",), {}),
        "sent with flags of text": (sender.send, (pb_utils.InferenceResponse([]), "x"), {}),
        "sent with flags below zero": (sender.send, (pb_utils.InferenceResponse([]), -1), {}),
        "sent with other flags": (sender.send, (pb_utils.InferenceResponse([]), 2), {}),
        "logger": (pb_utils.Logger, (), {}),
        "level": (pb_utils.Logger.log, ("x", "INFO"), {}),
        "logged number": (pb_utils.Logger.log_info, (5,), {}),
        "dependents": (pb_utils.unload_model, ("x", "y"), {}),
        "version": (pb_utils.is_model_ready, ("x", 1), {}),
        "files": (pb_utils.load_model, ("x", "", 5), {}),
    }
    found = {}
    for name, (call, args, kwargs) in calls.items():
        kind, text = raised(call, *args, **kwargs) or ["nothing", ""]
        found[name] = text if kind == "TritonModelException" else kind
    others = {name: what for name, what in found.items() if what != "TypeError"}
    return [len(found) - len(others), others]


@case
def response_accessors(model, request):
    good = pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("A", np.zeros(1, np.float32))])
    bad = pb_utils.InferenceResponse(error=pb_utils.TritonError("broken", pb_utils.TritonError.NOT_FOUND))
    return [
        [t.name() for t in good.output_tensors()],
        good.has_error(),
        good.error() is None,
        bad.has_error(),
        bad.error().message(),
        raised(pb_utils.InferenceResponse, [None]),
    ]


@case
def logger_levels(model, request):
    logger = pb_utils.Logger
    logger.log("utilities: plain")
    logger.log("utilities: at error", logger.ERROR)
    logger.log_info("utilities: info")
    logger.log_warn("utilities: warning")
    logger.log_error("utilities: error")
    logger.log_verbose("utilities: verbose")
    return None


def create_metrics(model):
    """Families and metrics are made once: they live as long as the model."""
    if not hasattr(model, "counters"):
        model.counters = pb_utils.MetricFamily("toy_counter", "Counts", pb_utils.MetricFamily.COUNTER)
        model.gauges = pb_utils.MetricFamily("toy_gauge", "Gauges", pb_utils.MetricFamily.GAUGE)
        model.counter = model.counters.Metric({"model": "utilities"})
        model.gauge = model.gauges.Metric({})


@case
def metrics(model, request):
    create_metrics(model)
    counter, gauge = model.counter, model.gauge
    before = counter.value()
    counter.increment(2.5)
    gauge.set(7)
    gauge.increment(-1)
    return [counter.value() - before, gauge.value()]


@case
def metrics_refuse_wrong_operations(model, request):
    create_metrics(model)
    return [
        raised(model.counter.set, 1),
        raised(model.counter.increment, -1),
        raised(model.gauges.Metric, "labels"),
    ]


@case
def bls(model, request):
    a = pb_utils.Tensor("INPUT0", np.arange(16, dtype=np.int32))
    b = pb_utils.Tensor("INPUT1", np.ones(16, np.int32))
    response = pb_utils.InferenceRequest(
        model_name="add_sub", requested_output_names=["OUTPUT0"], inputs=[a, b], request_id="inner"
    ).exec()
    return [[t.name() for t in response.output_tensors()], response.output_tensors()[0].as_numpy().tolist()]


@case
def bls_errors(model, request):
    text = pb_utils.Tensor("IN", np.array([2], np.int32))
    build = pb_utils.InferenceRequest
    unknown = build(model_name="absent", requested_output_names=["O"], inputs=[text], request_id="inner").exec()
    wrong = build(model_name="add_sub", requested_output_names=["OUTPUT0"], inputs=[text], request_id="inner").exec()
    decoupled = build(model_name="repeat", requested_output_names=["OUT"], inputs=[text], request_id="inner").exec()
    return [response.error().message() for response in (unknown, wrong, decoupled)]


@case
def bls_decoupled(model, request):
    request = pb_utils.InferenceRequest(
        model_name="repeat", requested_output_names=["OUT"], inputs=[pb_utils.Tensor("IN", np.array([4, 2], np.int32))]
    )
    return [[t.as_numpy().tolist() for t in response.output_tensors()] for response in request.exec(decoupled=True)]


@case
def models_ready(model, request):
    return [
        pb_utils.is_model_ready("add_sub"),
        pb_utils.is_model_ready("add_sub", "1"),
        pb_utils.is_model_ready("add_sub", "9"),
        pb_utils.is_model_ready("absent"),
    ]


class TritonPythonModel:
    def initialize(self, args):
        self.config = json.loads(args["model_config"])
        self.outside = raised(
            pb_utils.InferenceRequest(
                model_name="add_sub",
                requested_output_names=["OUTPUT0"],
                inputs=[pb_utils.Tensor("INPUT0", np.zeros(16, np.int32))],
            ).exec
        )

    def execute(self, requests):
        responses = []
        for request in requests:
            name = request.inputs()[0].as_numpy()[0].decode()
            result = self.outside if name == "bls_in_initialize" else CASES[name](self, request)
            output = pb_utils.Tensor("RESULT", np.array([json.dumps(result)], np.object_))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
