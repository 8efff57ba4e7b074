"""Random requests by the schemas of the clients of OpenAI and Anthropic, sent to a server over HTTP.

``make fuzz-requests`` sends 10,000 to each route: every one is answered or refused, never with 500;
answers have the form of the client's models; and no member is ignored that docs/openai.md and docs/retrieval.md do not
name.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from anthropic.types import Message, MessageTokensCount, message_count_tokens_params, message_create_params
from openai.types import (
    Completion,
    completion_create_params,
    embedding_create_params,
)
from openai.types.audio import Transcription, transcription_create_params
from openai.types.chat import ChatCompletion
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import Response, response_create_params

from tests.clients.asking import recording
from tests.fuzz.schemas import RandomValues
from tests.models import build
from tests.servers import ConchServer

DOCS: Final = Path(__file__).parents[2] / "docs"
CHAT: Final = {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 9}
UNKNOWN: Final = "not_a_member"


def _any(body: bytes) -> None: ...


def _transcription(body: bytes) -> None:
    if body[:1] == b"{":  # otherwise text or subtitles
        Transcription.model_validate_json(body)


@dataclass(frozen=True, slots=True)
class FuzzedRoute:
    """``accepted`` are members that are always accepted; ``validate`` raises for a wrong body.

    ``ends`` are what the last event of a stream may have, none for a route without streams.
    """

    path: str
    model: str
    schema: Any
    accepted: dict[str, Any]
    validate: Callable[[bytes], Any]
    ends: tuple[str, ...] = ()
    form: bool = False


ROUTES: Final = {
    "chat": FuzzedRoute(
        "/v1/chat/completions", "talker", chat_create_params.CompletionCreateParamsNonStreaming, CHAT,
        ChatCompletion.model_validate_json, ("[DONE]",),
    ),
    "completions": FuzzedRoute(
        "/v1/completions", "talker", completion_create_params.CompletionCreateParamsNonStreaming, {"prompt": "a b"},
        Completion.model_validate_json, ("[DONE]",),
    ),
    "responses": FuzzedRoute(
        "/v1/responses", "talker", response_create_params.ResponseCreateParamsNonStreaming, {"input": "a b"},
        Response.model_validate_json, ('"response.completed"', '"response.incomplete"'),
    ),
    "messages": FuzzedRoute(
        "/v1/messages", "talker", message_create_params.MessageCreateParamsNonStreaming, CHAT,
        Message.model_validate_json, ('"message_stop"',),
    ),
    "count_tokens": FuzzedRoute(
        "/v1/messages/count_tokens", "talker", message_count_tokens_params.MessageCountTokensParams,
        {"messages": CHAT["messages"]}, MessageTokensCount.model_validate_json,
    ),
    "embeddings": FuzzedRoute(
        "/v1/embeddings", "embedder", embedding_create_params.EmbeddingCreateParams, {"input": "a b"}, _any
    ),
    "transcriptions": FuzzedRoute(
        "/v1/audio/transcriptions", "listener", transcription_create_params.TranscriptionCreateParamsNonStreaming,
        {"file": recording()}, _transcription, form=True,
    ),
}  # fmt: skip


class Fuzzing:
    """Sends random requests; ``used`` has the members of accepted ones, ``answered`` is their number."""

    def __init__(self, server: ConchServer, chance: random.Random) -> None:
        self.chance = chance
        self.used: set[str] = set()
        self.answered = 0
        self._connection = http.client.HTTPConnection(server.http, timeout=60)
        self._values = RandomValues(chance)

    def send_one(self, route: FuzzedRoute) -> None:
        """Send a random request; if it is accepted, also with an unknown member. Raises AssertionError."""
        members = self._values.members(route.schema)
        if self.chance.random() < 0.7:
            # Otherwise, most are refused for a message or for a member that needs a service of the provider.
            few = self.chance.sample(sorted(members), min(len(members), 3))
            members = {name: members[name] for name in few} | route.accepted
        members["model"] = route.model
        streams = bool(route.ends) and self.chance.random() < 0.3
        if streams:
            members["stream"] = True
        status, body = self._post(route, members)
        assert status in (200, 400, 404, 501), (status, body, members)
        if status != 200:
            assert json.loads(body)["error"]["message"], members
            return
        self.answered += 1
        self.used |= {name for name, value in members.items() if value not in (None, False, "", [], {})}
        if streams:
            assert any(end in body.decode().rstrip().rpartition("\n\n")[2] for end in route.ends), (body, members)
        elif not members.get("stream"):
            route.validate(body)
        status, body = self._post(route, {**members, UNKNOWN: "a"})
        assert status == 400 and UNKNOWN in json.loads(body)["error"]["message"], (status, body, members)

    def _post(self, route: FuzzedRoute, members: dict[str, Any]) -> tuple[int, bytes]:
        body, kind = _form(members, self.chance) if route.form else (json.dumps(members).encode(), "application/json")
        self._connection.request("POST", route.path, body, {"content-type": kind})
        reply = self._connection.getresponse()
        return reply.status, reply.read()


def _form(members: dict[str, Any], chance: random.Random) -> tuple[bytes, str]:
    """Return a multipart form and its content type; half of the files are no recordings."""
    boundary, parts = uuid4().hex, []
    for name, value in members.items():
        if name == "file":
            content = value if isinstance(value, bytes) else chance.randbytes(40)
            parts.append(('name="file"; filename="a.wav"', content))
            continue
        for item in value if isinstance(value, list) else [value]:
            text = item if isinstance(item, str) else json.dumps(item)
            parts.append((f'name="{name}{"[]" if isinstance(value, list) else ""}"', text.encode()))
    body = b"".join(
        b"--%b\r\ncontent-disposition: form-data; %b\r\n\r\n%b\r\n" % (boundary.encode(), head.encode(), content)
        for head, content in parts
    )
    return body + b"--%b--\r\n" % boundary.encode(), f"multipart/form-data; boundary={boundary}"


def documented_members() -> set[str]:
    """Return all words of the pages about these routes."""
    return {word for page in ("openai.md", "retrieval.md") for word in re.findall(r"\w+", (DOCS / page).read_text())}


def start_server(folder: Path) -> ConchServer:
    repository = build(folder / "models", group="clients")
    build(repository, "talker", group="openai")
    return ConchServer(repository, log=folder / "log", env={"EVENTS": str(folder)})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.http_requests", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="the number of requests to each route")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--route", action="append", choices=ROUTES, help="default: all")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    with tempfile.TemporaryDirectory() as folder, start_server(Path(folder)) as server:
        for name in arguments.route or ROUTES:
            route = ROUTES[name]
            fuzzing = Fuzzing(server, random.Random(arguments.seed))
            for _ in range(arguments.requests):
                fuzzing.send_one(route)
            silent = fuzzing.used - documented_members()
            assert not silent, f"{name}: {silent} are not documented"
            print(f"{name}: {arguments.requests} requests, {fuzzing.answered} answered", flush=True)


if __name__ == "__main__":
    main()
