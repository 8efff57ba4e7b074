"""Messages that were answered from the response cache are answered with the same bytes."""

from conch.config.pbtxt import parse
from conch.core.inference import InferRequest
from conch.server.caching.cache import CachedResponse
from conch.server.caching.local import LocalCache
from conch.server.execution.caching import CacheLookup
from conch.server.model import Model
from conch.telemetry.statistics import ModelStatistics
from tests.unit.server.test_model import CONFIG, FakeExecutor

A, B = (CachedResponse((), {}, 1_000) for _ in range(2))


def hit(key: bytes, entry: CachedResponse = A, **fields: str) -> InferRequest:
    request = InferRequest("m", {}, lambda response: None, **fields)
    request.times.lookup, request.times.key, request.times.entry = 1, key, entry
    return request


class Shelf:
    """A model whose cache of 4,000 bytes has the entries ``a`` and ``b`` of 1,000 each."""

    def __init__(self) -> None:
        self.cache = LocalCache(4_000)
        self.scope = self.cache.scope("m", 3, b"")
        for key, entry in ((b"a", A), (b"b", B)):
            self.scope.insert(key, entry)
        self.statistics = ModelStatistics("m", 3)
        executor = FakeExecutor()
        lookup = CacheLookup(executor, lambda: self.scope, self.statistics)
        self.model = Model(parse(CONFIG, "x"), 3, executor, self.statistics, {}, cache=lookup)
        assert lookup.messages is not None
        self.cached_messages = lookup.messages


async def test_what_was_sent_is_sent_again_and_counts_as_a_hit() -> None:
    shelf = Shelf()
    assert shelf.model.cached_response(b"message") is None
    shelf.cached_messages.keep(hit(b"a"), b"message", "answer", 100)
    assert shelf.model.cached_response(b"message") == "answer"
    assert (shelf.statistics.cache_hit_count, shelf.statistics.success_count, shelf.cache.hits) == (1, 1, 1)
    assert shelf.model.last_ended
    assert shelf.cache.used == 2_600
    shelf.model.stopping = True
    assert shelf.model.cached_response(b"message") is None


async def test_answers_go_with_their_entries() -> None:
    shelf = Shelf()
    shelf.cached_messages.keep(hit(b"a"), b"message", "answer", 100)
    shelf.cached_messages.keep(hit(b"b", B), b"other", "other answer", 100)
    assert shelf.cache.used == 3_200
    shelf.scope.insert(b"c", CachedResponse((), {}, 1_500))
    assert shelf.model.cached_response(b"message") is None
    assert shelf.model.cached_response(b"other") == "other answer"
    shelf.scope.forget()
    assert shelf.model.cached_response(b"other") is None and shelf.cache.used == 0


async def test_only_answers_from_the_cache_to_requests_without_an_id_are_kept() -> None:
    shelf = Shelf()
    miss = InferRequest("m", {}, lambda response: None)
    for request in (miss, hit(b"a", id="7"), hit(b"gone")):
        shelf.cached_messages.keep(request, b"message", "answer", 100)
    shelf.cached_messages.keep(hit(b"a"), b"message", "answer", 3_500)
    assert shelf.model.cached_response(b"message") is None and shelf.cache.used == 2_000
    shelf.cache.size = 20_000
    for number in range(6):
        shelf.cached_messages.keep(hit(b"a"), number, f"answer {number}", 10)
    answers = [shelf.model.cached_response(number) for number in range(6)]
    assert answers == ["answer 0", "answer 1", "answer 2", "answer 3", None, None]


async def test_same_message_twice_in_one_turn_is_kept_once_and_removed_with_its_entry() -> None:
    shelf = Shelf()
    for _ in range(2):
        shelf.cached_messages.keep(hit(b"a"), b"message", "answer", 100)
    assert shelf.cache.used == 2_600
    shelf.scope.insert(b"c", CachedResponse((), {}, 3_000))
    assert shelf.model.cached_response(b"message") is None and len(shelf.cache) == 1
    shelf.scope.forget()
    assert shelf.cache.used == 0


async def test_answer_is_not_kept_beside_an_entry_that_replaced_its_own() -> None:
    shelf = Shelf()
    late = hit(b"a")
    shelf.scope = shelf.cache.scope("m", 3, b"")  # a step of the ensemble was reloaded
    shelf.scope.insert(b"a", CachedResponse((), {}, 1_000))
    shelf.cached_messages.keep(late, b"message", "answer of the old step", 100)
    assert shelf.model.cached_response(b"message") is None


async def test_version_that_ends_after_its_cache_was_closed_ends() -> None:
    shelf = Shelf()
    shelf.cached_messages.keep(hit(b"a"), b"message", "answer", 100)
    await shelf.cache.close()
    shelf.scope.forget()
    assert shelf.cache.used == 0 and shelf.model.cached_response(b"message") is None
