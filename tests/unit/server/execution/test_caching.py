"""A model behind the response cache, with an executor that the test controls."""

import asyncio

import pytest

from conch.config.pbtxt import parse
from conch.core.errors import Code, ConchError, internal, unavailable
from conch.core.inference import InferRequest, InferResponse, SharedTensors
from conch.core.tensors import Buffer, WireTensor
from conch.server.caching.cache import CachedResponse, CacheScope
from conch.server.caching.local import LocalCache
from conch.server.execution import caching
from conch.server.execution.caching import CacheLookup
from conch.server.model import Model
from conch.telemetry.statistics import ModelStatistics
from tests.unit.fake_clock import settle
from tests.unit.server.fakes import Answers, UncopiedData
from tests.unit.server.test_model import CONFIG, FakeExecutor


class Rig:
    """A model, its cache and what was asked of its executor."""

    def __init__(self, ordered: bool = False) -> None:
        self.inner = FakeExecutor()
        self.cache = LocalCache(1 << 20)
        self.statistics = ModelStatistics("m", 3)
        self.scope: CacheScope = self.cache.scope("m", 3, b"")
        lookup = CacheLookup(self.inner, lambda: self.scope, self.statistics)
        self.model = Model(parse(CONFIG, "x"), 3, self.inner, self.statistics, {}, cache=lookup, ordered=ordered)

    async def ask(self, data: bytes = b"abcd") -> Answers:
        answers = Answers()
        self.model.infer(InferRequest("m", {"x": WireTensor("x", "FP32", (1,), data)}, answers))
        await settle()
        return answers

    def answer(self, *responses: InferResponse) -> None:
        request = self.inner.requests.pop(0)
        request.times.started, request.responded = 1, True
        for response in responses or (InferResponse([WireTensor("y", "FP32", (1,), b"wxyz")], parameters={"n": 1}),):
            request.respond(response)

    @property
    def counts(self) -> tuple[int, int, int, int]:
        stats = self.statistics
        return stats.cache_hit_count, stats.cache_miss_count, stats.success_count, stats.inference_count


async def test_second_request_is_answered_without_the_executor() -> None:
    rig = Rig()
    first = await rig.ask()
    rig.answer()
    second = await rig.ask()
    assert not rig.inner.requests and rig.model.in_flight == 0
    for answers in (first, second):
        (response,) = answers.responses
        assert response.outputs[0].shape == (1, 1) and bytes(response.outputs[0].data) == b"wxyz"
        assert response.parameters == {"n": 1}
    assert rig.counts == (1, 1, 2, 1)


async def test_outputs_that_go_to_shared_memory_are_kept_for_others_as_well() -> None:
    written: list[bytes] = []

    class Place:
        def check(self, name: str, size: int) -> None: ...

        def write(self, data: Buffer) -> None:
            written.append(bytes(data))

    rig = Rig()
    request = InferRequest("m", {"x": WireTensor("x", "FP32", (1,), b"abcd")}, Answers())
    request.shared = SharedTensors()
    request.shared.output_targets["y"] = Place()
    rig.model.infer(request)
    await settle()
    assert not request.shared.put("y", b"wxyz") and not written, "the entry of the cache would be empty"
    rig.answer()
    second = await rig.ask()
    assert bytes(second.responses[0].outputs[0].data) == b"wxyz"


async def test_request_whose_inputs_would_be_copied_from_shared_memory_is_refused_when_too_much_is_held() -> None:
    rig = Rig(ordered=True)
    request = InferRequest("m", {"x": WireTensor("x", "FP32", (1,), UncopiedData(4))}, Answers())
    with pytest.raises(ConchError, match="too many bytes"):
        rig.model.infer(request)
    assert not rig.model.in_flight and not rig.inner.requests
    await rig.ask()
    rig.answer()
    assert (await rig.ask()).finals == 1


@pytest.mark.parametrize("ordered", [False, True])
async def test_requests_of_sequences_always_run(ordered: bool) -> None:
    rig = Rig(ordered)
    for _ in range(2):
        answers = Answers()
        inputs = {"x": WireTensor("x", "FP32", (1,), b"abcd")}
        rig.model.infer(InferRequest("m", inputs, answers, correlation_id=7))
        await settle()
        rig.answer()
        assert answers.finals == 1
    assert (rig.counts[:3], len(rig.cache), rig.cache.lookups) == ((0, 0, 2), 0, 0)


async def test_same_requests_at_the_same_time_both_run_and_one_is_counted_as_a_miss() -> None:
    rig = Rig()
    await rig.ask()
    await rig.ask()
    assert len(rig.inner.requests) == 2
    rig.answer()
    rig.answer()
    assert rig.counts == (0, 1, 2, 2)


@pytest.mark.parametrize(
    "responses",
    [
        [InferResponse(error=internal("failed"))],
        [InferResponse()],
        [InferResponse([WireTensor("y", "FP32", (1,), b"wxyz")], final=False), InferResponse(error=internal("failed"))],
        [InferResponse([WireTensor("y", "FP32", (1,), b"wxyz")], final=False),
         InferResponse([WireTensor("y", "FP32", (1,), b"wxyz")])],
    ],
)  # fmt: skip
async def test_errors_and_what_is_not_one_response_are_not_kept(responses: list[InferResponse]) -> None:
    rig = Rig()
    await rig.ask()
    rig.answer(*responses)
    await rig.ask()
    assert len(rig.inner.requests) == 1 and len(rig.cache) == 0
    assert rig.counts[:2] == (0, 1)


async def test_response_of_members_that_were_replaced_in_between_is_not_kept() -> None:
    rig = Rig()
    await rig.ask()
    old, rig.scope = rig.scope, rig.cache.scope("m", 3, b"")
    rig.answer()
    assert not rig.cache and old is not rig.scope
    assert rig.statistics.cache_miss_count == 1
    await rig.ask()
    rig.answer()
    assert len(rig.cache) == 1


async def test_response_that_ends_with_a_flag_alone_is_kept() -> None:
    rig = Rig()
    await rig.ask()
    rig.answer(InferResponse([WireTensor("y", "FP32", (1,), b"wxyz")], final=False), InferResponse())
    assert (await rig.ask()).finals == 1 and not rig.inner.requests


async def test_refused_request_is_refused_as_without_a_cache() -> None:
    rig = Rig()
    rig.inner.refusal = unavailable("Exceeds maximum queue size")
    with pytest.raises(ConchError, match="Exceeds maximum queue size"):
        await rig.ask()
    assert rig.model.in_flight == 0 and rig.statistics.fail_count == 1


async def test_hits_keep_the_order_of_arrival_and_refusals_are_immediate() -> None:
    rig = Rig(ordered=True)
    await rig.ask(b"aaaa")
    rig.answer()
    slow = await rig.ask(b"bbbb")
    hit = await rig.ask(b"aaaa")
    rig.inner.refusal = unavailable("Exceeds maximum queue size")
    with pytest.raises(ConchError, match="Exceeds maximum queue size"):
        await rig.ask(b"cccc")
    assert not hit.responses
    rig.answer()
    assert slow.finals == hit.finals == 1
    assert rig.model.in_flight == 0


class SlowArea:
    """A cache somewhere else: the test answers."""

    def __init__(self) -> None:
        self.lookups: list[asyncio.Future[CachedResponse | None]] = []

    def find(self, key: bytes) -> asyncio.Future[CachedResponse | None]:
        self.lookups.append(asyncio.get_running_loop().create_future())
        return self.lookups[-1]

    def insert(self, key: bytes, entry: CachedResponse) -> bool:
        return True

    def forget(self) -> None: ...


def slow_rig() -> tuple[Rig, SlowArea]:
    rig, scope = Rig(), SlowArea()
    rig.scope = scope
    return rig, scope


async def test_request_runs_when_a_slow_cache_has_nothing() -> None:
    rig, scope = slow_rig()
    answers = await rig.ask()
    assert not rig.inner.requests
    scope.lookups[0].set_result(None)
    await settle()
    rig.answer()
    assert answers.finals == 1 and rig.counts == (0, 1, 1, 1)


async def test_client_hangs_up_during_the_lookup() -> None:
    rig, scope = slow_rig()
    answers = Answers()
    request = InferRequest("m", {"x": WireTensor("x", "FP32", (1,), b"abcd")}, answers)
    rig.model.infer(request)
    await settle()
    request.cancel()
    assert answers.error is not None and answers.error.code is Code.CANCELLED
    scope.lookups[0].set_result(None)
    await settle()
    assert not rig.inner.requests and answers.finals == 1 and rig.model.in_flight == 0


async def test_refusal_after_a_slow_lookup_reaches_the_client() -> None:
    rig, scope = slow_rig()
    rig.inner.refusal = unavailable("Exceeds maximum queue size")
    answers = await rig.ask()
    scope.lookups[0].set_result(None)
    await settle()
    assert answers.error is not None and rig.model.in_flight == 0 and rig.statistics.fail_count == 1


async def test_unexpected_failure_of_a_lookup_fails_the_request() -> None:
    rig, scope = slow_rig()
    answers = await rig.ask()
    scope.lookups[0].set_exception(RuntimeError("a bug"))
    await settle()
    assert answers.error is not None and answers.error.message == "RuntimeError: a bug" and rig.model.in_flight == 0


async def test_unloading_fails_what_is_being_looked_up() -> None:
    rig, scope = slow_rig()
    answers = await rig.ask()
    await rig.model.stop(0)
    scope.lookups[0].set_result(None)
    await settle()
    assert answers.finals == 1 and answers.error is not None and rig.model.in_flight == 0


async def test_large_inputs_are_gone_through_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "MOST_BYTES_AT_ONCE", 3)
    rig = Rig()
    for _ in range(2):
        answers = await rig.ask()
        while not rig.inner.requests and not answers.responses:
            await asyncio.sleep(0)
        if rig.inner.requests:
            rig.answer()
    assert answers.finals == 1 and rig.counts == (1, 1, 2, 1)
