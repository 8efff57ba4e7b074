from conch.core.inference import InferRequest, InferResponse
from conch.server.schedulers.ordering import InOrder


def admitted(order: InOrder, count: int) -> tuple[list[InferRequest], list[tuple[int, bool]]]:
    heard: list[tuple[int, bool]] = []
    requests = []
    for number in range(count):
        request = InferRequest("m", {}, lambda response, number=number: heard.append((number, response.final)))
        order.admit(request)
        requests.append(request)
    return requests, heard


def test_early_answers_wait_for_those_before_them() -> None:
    (first, second, third), heard = admitted(InOrder(), 3)
    third.respond(InferResponse())
    second.respond(InferResponse())
    assert heard == []
    first.respond(InferResponse())
    assert heard == [(0, True), (1, True), (2, True)]


def test_receiver_that_fails_keeps_no_other_from_its_response() -> None:
    def fail(response: InferResponse) -> None:
        raise ValueError

    order = InOrder()
    failing = InferRequest("m", {}, fail)
    order.admit(failing)
    (first, second), heard = admitted(order, 2)
    for request in (second, first, failing):
        request.respond(InferResponse())
    assert heard == [(0, True), (1, True)]


def test_responses_of_the_first_pass_at_once() -> None:
    (first, second), heard = admitted(InOrder(), 2)
    first.respond(InferResponse(final=False))
    second.respond(InferResponse(final=False))
    assert heard == [(0, False)]
    first.respond(InferResponse())
    assert heard == [(0, False), (0, True), (1, False)]
