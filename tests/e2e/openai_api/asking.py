"""Requests that the tests send."""

from __future__ import annotations

import http.client
import json
from typing import Any

from tests.servers import ConchServer

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}


def say(content: Any, **more: Any) -> dict[str, Any]:
    return {"model": "talker", "messages": [{"role": "user", "content": content}], **more}


def post(server: ConchServer, path: str, body: Any) -> tuple[int, dict[str, str], Any]:
    """Ask without a client that helps."""
    connection = http.client.HTTPConnection(server.http, timeout=60)
    connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body))
    reply = connection.getresponse()
    data = json.loads(reply.read())
    connection.close()
    return reply.status, dict(reply.getheaders()), data
