"""Reads the requests of other APIs that have been translated to chats; errors name the members of the original."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from conch.wire.openai.chat import ChatForm, ChatRequest, read_chat
from conch.wire.openai.reading import ApiError, Fields

_QUOTED: Final = re.compile("'([^']+)'")


def read_translated(chat: Mapping[str, Any], names: Mapping[str, str], form: ChatForm | None) -> ChatRequest:
    """Read a chat whose response has another ``form``.

    ``names`` has the original of each member, or of a part of its path, that an error may name. Raises ApiError.
    """

    def original(path: str) -> str:
        for member, name in names.items():
            path = path.replace(member, name)
        return path

    try:
        request = read_chat(Fields({member: value for member, value in chat.items() if value is not None}))
    except ApiError as error:
        message = _QUOTED.sub(lambda quoted: f"'{original(quoted[1])}'", error.message)
        param = error.param and original(error.param)
        raise ApiError(message, param, code=error.code, reason=error.reason) from None
    members = {"messages": "messages", **request.members}
    return replace(request, members={name: original(member) for name, member in members.items()}, form=form)
