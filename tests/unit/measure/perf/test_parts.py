"""Schedules, stability, data and statistics."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from conch.core.errors import ConchError
from conch.core.inference import TensorSpec
from conch.measure.perf.figures import Stability
from conch.measure.perf.inputs.data import DataOptions, in_batches
from conch.measure.perf.inputs.files import samples
from conch.measure.perf.inputs.specs import ModelSpec, read_model
from conch.measure.perf.plan import Levels, read_address
from conch.measure.perf.requests.encoding import RequestForm, infer_message, infer_request
from conch.measure.perf.requests.shared_memory import MemoryLayout, SharedRegion
from conch.measure.perf.senders.load import Constant, Intervals, Poisson, share_of
from conch.measure.perf.server.statistics import differences

METADATA = {
    "name": "m",
    "inputs": [
        {"name": "ids", "datatype": "INT64", "shape": ["-1", "-1"]},
        {"name": "text", "datatype": "BYTES", "shape": ["-1", "1"]},
    ],
}
CONFIG = {"max_batch_size": 4, "input": [{"name": "text", "optional": True}]}


@pytest.fixture
def model() -> ModelSpec:
    return read_model(METADATA, CONFIG, "")


def test_constant_rates_do_not_drift() -> None:
    moments = list(islice(Constant(3).moments(0), 3001))
    assert moments[-1] == 1000 * 10**9


def test_poisson_rates_have_their_mean_and_are_repeatable() -> None:
    moments = list(islice(Poisson(100).moments(0), 20_000))
    assert moments[-1] / 1e9 == pytest.approx(200, rel=0.05)
    assert moments == list(islice(Poisson(100).moments(0), 20_000)) != list(islice(Poisson(100, 1).moments(0), 20_000))


def test_shares_of_a_schedule_are_the_schedule() -> None:
    shares = [list(islice(share_of(Intervals([1, 2]), 10, number, 3), 4)) for number in range(3)]
    assert sorted(moment for share in shares for moment in share) == list(islice(Intervals([1, 2]).moments(10), 12))


def test_stability_needs_three_windows_that_agree() -> None:
    stability = Stability(0.1, 5)
    for throughput in (50, 100, 104):
        stability.add(throughput, 1.0)
        assert not stability.over
    stability.add(98, 1.0)
    assert stability.stable and stability.over
    never = Stability(0.1, 3)
    for throughput in (1, 100, 1):
        never.add(throughput, 1.0)
    assert never.over and not never.stable
    silent = Stability(0.1, 3)
    for _ in range(3):
        silent.add(0, 0)
    assert not silent.stable


def test_variable_shapes_have_to_be_given(model: ModelSpec) -> None:
    with pytest.raises(ConchError, match=r"input 'ids' .* --shape ids:16"):
        samples(model, DataOptions())
    found = samples(model, DataOptions(shapes={"ids": (3,)})).samples
    assert len(found) > 1 and set(found[0]) == {"ids"} and len(found[0]["ids"].data) == 24


def test_data_of_files_is_read_in_all_forms(model: ModelSpec, tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    encoded = base64.b64encode((7).to_bytes(8, "little")).decode()
    entries = [
        {"ids": [1, 2, 3], "text": ["a"]},
        {"ids": {"content": [1, 2], "shape": [2]}},
        [{"ids": {"b64": encoded, "shape": [1]}}],
    ]
    file.write_text(json.dumps({"data": entries}))
    found = samples(model, DataOptions(str(file))).samples
    assert [one["ids"].dims for one in found] == [(3,), (2,), (1,)]
    assert found[2]["ids"].data == (7).to_bytes(8, "little")
    assert found[0]["text"].data == b"\x01\0\0\0a"


@pytest.mark.parametrize(
    ("content", "shape", "data"),
    [
        (b"\x05\0\0\0hello", [1], b"\x05\0\0\0hello"),
        (b"\x01\0\0\0a\x02\0\0\0bc", [2], b"\x01\0\0\0a\x02\0\0\0bc"),
        (b"\x89PNG\r\n", [1], b"\x06\0\0\0\x89PNG\r\n"),
        (b"", [1], b"\0\0\0\0"),
    ],
)
def test_base64_of_texts_is_a_tensor_as_in_perf_analyzer_or_its_only_element(
    tmp_path: Path, content: bytes, shape: list[int], data: bytes
) -> None:
    tensor = {"name": "x", "datatype": "BYTES", "shape": [-1]}
    spec = read_model({"name": "m", "inputs": [tensor], "outputs": [tensor]}, {}, "")
    value = {"b64": base64.b64encode(content).decode(), "shape": shape}
    document = {"data": [{"x": value}], "validation_data": [{"x": value}]}
    read = samples(spec, DataOptions(_write(tmp_path, "data.json", document)))
    assert (read.samples[0]["x"].data, read.expected[0]["x"]) == (data, data)


def test_base64_that_is_not_as_many_texts_as_the_shape_has_is_refused(tmp_path: Path) -> None:
    spec = read_model({"name": "m", "inputs": [{"name": "x", "datatype": "BYTES", "shape": [2]}]}, {}, "")
    file = _write(tmp_path, "data.json", {"data": [{"x": {"b64": base64.b64encode(b"\x01\0\0\0a").decode()}}]})
    with pytest.raises(ConchError, match=r"input 'x': the shape \[2\] takes 2 elements"):
        samples(spec, DataOptions(file))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("{}", 'expected {"data"'),
        ('{"data": [{"nobody": [1]}]}', "entry 0: model 'm' has no input 'nobody'"),
        ('{"data": [{"text": ["a"]}]}', "entry 0: no data for the inputs ids"),
        ('{"data": [{"ids": {"b64": "?", "shape": [1]}}]}', "'b64' is not base64"),
        ('{"data": [{"ids": {"content": [1, 2], "shape": [3]}}]}', "input 'ids'"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(model: ModelSpec, tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "data.json"
    file.write_text(text)
    with pytest.raises(ConchError) as refused:
        samples(model, DataOptions(str(file)))
    assert message in refused.value.message


def test_folders_have_a_file_for_each_input(model: ModelSpec, tmp_path: Path) -> None:
    (tmp_path / "ids").write_bytes(bytes(16))
    [found] = samples(model, DataOptions(str(tmp_path), {"ids": (2,)})).samples
    assert found["ids"].data == bytes(16)
    with pytest.raises(ConchError, match="16 bytes, but INT64"):
        samples(model, DataOptions(str(tmp_path), {"ids": (3,)}))


def test_both_protocols_send_the_same(model: ModelSpec) -> None:
    from tritonclient.grpc import service_pb2

    found = list(samples(model, DataOptions("zero", {"ids": (2,)})).samples)
    [batch] = in_batches(found, 1)
    message = service_pb2.ModelInferRequest.FromString(infer_message(model, batch, RequestForm()).data[5:])
    assert message.raw_input_contents == [bytes(16)] and list(message.inputs[0].shape) == [1, 2]
    request = infer_request(model, batch, RequestForm("h:1", binary_input=False)).data
    assert json.loads(request.partition(b"\r\n\r\n")[2])["inputs"][0]["data"] == [0, 0]
    assert len(in_batches(found * 5, 2)) == 3


def test_levels_and_addresses() -> None:
    assert list(Levels.parse("--c", "1:9:4")) == [1, 5, 9] and list(Levels.parse("--c", "2:3")) == [2, 3]
    for text in ("", "0", "3:1", "1:2:3:4", "a"):
        with pytest.raises(ConchError, match="--c"):
            Levels.parse("--c", text)
    address, prefix = read_address("https://host:8443/path/", "http")
    assert (address.host, address.port, address.encrypted, prefix) == ("host", 8443, True, "/path")
    assert read_address("[::1]:9", "grpc")[0].host == "::1" and read_address("localhost", "grpc")[0].port == 8001
    for text in ("ftp://host", "host:x", ":1"):
        with pytest.raises(ConchError, match="-u"):
            read_address(text, "http")


def test_statistics_are_subtracted() -> None:
    def stats(count: int, ns: int) -> list[dict[str, object]]:
        stages = {"queue": {"count": str(count), "ns": str(ns)}}
        return [{"name": "m", "version": "1", "inference_count": str(count), "execution_count": count // 2,
                 "inference_stats": stages}]  # fmt: skip

    [found] = differences(stats(10, 10**9), stats(30, 5 * 10**9))
    assert (found.inferences, found.batch_size) == (20, 2.0)
    assert found.stages["queue"].average == pytest.approx(0.2)
    [reloaded] = differences(stats(10, 10**9), stats(4, 10**9))
    assert reloaded.inferences == 4
    assert differences(stats(4, 1), stats(4, 1)) == []
    # A server that has counted further since it was started anew than it had before shows it by its times.
    [restarted] = differences(stats(10, 10**9), stats(12, 10**8))
    assert restarted.inferences == 12


def _write(folder: Path, name: str, document: object) -> str:
    file = folder / name
    file.write_text(json.dumps(document))
    return str(file)


def test_lists_in_files_are_sequences_and_files_follow_one_another(model: ModelSpec, tmp_path: Path) -> None:
    one, two = {"ids": [1]}, {"ids": [2]}
    first = _write(tmp_path, "first.json", {"data": [[one, two, one], [two]]})
    second = _write(tmp_path, "second.json", {"data": [one, two]})
    found = samples(model, DataOptions(first, more=(second,)))
    assert list(map(list, found.streams)) == [[0, 1, 2], [3], [4, 5]] and found.expected == ()
    assert [sample["ids"].data[0] for sample in found.samples] == [1, 2, 1, 2, 1, 2]


def test_right_outputs_belong_to_samples(model: ModelSpec, tmp_path: Path) -> None:
    spec = replace(model, outputs={"out": TensorSpec("out", "INT32", (1,))})
    right = {"data": [[{"ids": [1]}], [{"ids": [2]}]], "validation_data": [[{"out": [5]}], [{"out": {"content": [6]}}]]}
    file = _write(tmp_path, "right.json", right)
    unknown = _write(tmp_path, "unknown.json", {"data": [{"ids": [1]}]})
    found = samples(spec, DataOptions(file, more=(unknown,)))
    assert found.expected == [{"out": b"\x05\0\0\0"}, {"out": b"\x06\0\0\0"}, {}]
    for wrong, said in (
        ({**right, "validation_data": [{"out": [5]}]}, "'validation_data' must have the same form as 'data'"),
        (
            {**right, "validation_data": [[{"no": [5]}], [{}]]},
            r"entry 0 of validation_data: .* no output 'no' \(it has",
        ),
        ({**right, "validation_data": [[{"out": ["x"]}], [{}]]}, "entry 0 of validation_data, output 'out'"),
    ):
        with pytest.raises(ConchError, match=said):
            samples(spec, DataOptions(_write(tmp_path, "wrong.json", wrong)))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"content": [1, 2], "shape": [1, 2]}, r"the shape \[1,2\] does not fit \[-1\]"),
        ({"content": [1, 2], "shape": "2"}, "'shape' is not a list of dimensions"),
        ({"content": [1, 2], "shape": [3]}, r"2 values, but the shape \[3\] takes 3"),
        ({"b64": "AAAA", "shape": [2]}, r"3 bytes, but INT64 \[2\] takes 16"),
        ({"value": 1}, "expected 'content' or 'b64'"),
    ],
)
def test_shapes_that_do_not_fit_are_named(model: ModelSpec, tmp_path: Path, given: object, said: str) -> None:
    file = _write(tmp_path, "data.json", {"data": [{"ids": [1]}, {"ids": given}]})
    with pytest.raises(ConchError, match=f"data.json, entry 1, input 'ids': {said}"):
        samples(model, DataOptions(file))


def test_files_that_are_not_there_are_named(model: ModelSpec, tmp_path: Path) -> None:
    with pytest.raises(ConchError, match="no such file; the other values are 'natural', 'random' and 'zero'"):
        samples(model, DataOptions("randon"))
    file = _write(tmp_path, "data.json", {"data": [{"ids": [1]}]})
    with pytest.raises(ConchError, match="only files can be given together"):
        samples(model, DataOptions(file, more=(str(tmp_path),)))
    (tmp_path / "ids").write_bytes(bytes(8))
    (tmp_path / "text").write_bytes(b"a\nb\n")
    found = samples(model, DataOptions(str(tmp_path), {"ids": (1,)}))
    assert found.samples[0]["text"].data == b"\x03\0\0\0a\nb"


def test_optional_inputs_are_left_out_but_for_the_text_of_a_model_that_takes_nothing_else() -> None:
    names = ("tools", "text_input")
    metadata = {"name": "m", "inputs": [{"name": name, "datatype": "BYTES", "shape": [1]} for name in names]}
    talker = read_model(metadata, {"input": [{"name": name, "optional": True} for name in names]}, "")
    assert set(samples(talker, DataOptions()).samples[0]) == {"text_input"}
    assert set(samples(talker, DataOptions(shapes={"tools": (1,)})).samples[0]) == {"tools"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (DataOptions(shapes={"ids": (-5,)}), "--shape ids:-5 does not fit"),
        (DataOptions(shapes={"ids": (10**12,)}), r"'ids' would have 7,450\.6 GiB in the shape"),
        (DataOptions(shapes={"ids": (1,), "text": (1,)}, string_length=10**10), "'text' would have 9.3 GiB"),
    ],
)
def test_data_that_cannot_be_sent_is_not_made(model: ModelSpec, options: DataOptions, said: str) -> None:
    with pytest.raises(ConchError, match=said):
        samples(model, options)


def test_regions_need_room() -> None:
    layout = MemoryLayout("conch_perf_test", {}, 1 << 50)
    with pytest.raises(ConchError, match=r"a region of 1,125,899,906,842,624 bytes cannot be created"):
        SharedRegion(layout, Nobody())


class Busy:
    """A server that uses a region when it is first asked to forget it."""

    def __init__(self) -> None:
        self.regions: list[str] = []
        self.refusals = 2

    def register_memory(self, region: str, key: str, size: int) -> None:
        self.regions.append(region)

    def unregister_memory(self, region: str) -> None:
        if self.refusals:
            self.refusals -= 1
            raise ConchError(f"Cannot unregister shared memory region '{region}', it is currently in use.")
        self.regions.remove(region)


def test_a_region_in_use_is_unregistered_when_it_is_let_go_of(model: ModelSpec) -> None:
    server = Busy()
    region = SharedRegion(MemoryLayout.of(model, 1, 64), server)
    assert len(server.regions) == 1
    region.close()
    assert server.regions == []


class Nobody:
    """A server without registered regions."""

    def register_memory(self, region: str, key: str, size: int) -> None:
        raise AssertionError

    def unregister_memory(self, region: str) -> None:
        raise AssertionError
