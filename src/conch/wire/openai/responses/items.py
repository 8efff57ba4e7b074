"""Items of the Responses API: checks those of a request, and converts items to the messages of a chat.

Items are messages, calls of functions, their outputs and reasoning. A response that continues another one has the items
of both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from struct import Struct
from typing import Any, Final
from urllib.parse import parse_qsl
from uuid import uuid4

import orjson

from conch.core.errors import clipped
from conch.core.tensors import Buffer
from conch.wire.openai.media import DETAILS, image_file, sound_file
from conch.wire.openai.reading import ApiError, Fields, one_of, wrong

Item = dict[str, Any]

_ROLES: Final = ("user", "assistant", "system", "developer")
#: The member of a text part with its text, by the type of the part.
_TEXTS: Final = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
#: Parts that need a service that is not here.
_FOREIGN_PARTS: Final = ("input_file",)
_PREFIXES: Final = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
#: The members of a reasoning item, and the types of their parts.
_REASONING: Final = {"summary": "summary_text", "content": "reasoning_text"}
#: The length of the response in an entry of the response store.
_LENGTH: Final = Struct("<Q")
#: The id of an item in the output of a response contains that of the response.
_OUTPUT_ID: Final = re.compile("[a-z]+_([0-9a-f]{32})[0-9a-f]+")
#: Maximum number of responses that are looked up for the references of a request.
_MAX_LOOKUPS: Final = 20
#: The default and maximum number of items in a list, as at OpenAI.
_PAGE: Final = 20
_LONGEST_PAGE: Final = 100


def output_id(kind: str, response: str, index: int) -> str:
    """Return the id of an item in the output of a response."""
    return f"{_PREFIXES[kind]}_{response.removeprefix('resp_')}{index:x}"


def read_items(fields: Fields, find_response: Callable[[str], Buffer]) -> tuple[str | None, list[Item], list[Item]]:
    """Read the id of the response that a request continues; return it with the items of that response, and the input.

    ``find_response`` returns an entry of the response store, empty if there is none. Every item gets a type and an id.
    Raises ApiError with the path of an invalid value, also for items of tools that run at OpenAI.
    """
    previous = fields.text("previous_response_id")
    if not previous:
        return None, [], _read_input(fields, find_response)
    entry = find_response(previous)
    if not entry:
        message = f"Previous response with id '{previous}' not found."
        raise ApiError(message, "previous_response_id", reason="previous_response_not_found")
    return previous, _stored_items(entry), _read_input(fields, find_response)


def _read_input(fields: Fields, find_response: Callable[[str], Buffer]) -> list[Item]:
    """Read ``input``, a text or items."""
    value = fields.required("input")
    if type(value) is str:
        return [_read_item({"role": "user", "content": value}, "input", {})]
    if type(value) is not list:
        raise wrong("input", value, "a string or an array of items")
    known = _referenced_items(value, find_response)
    return [_read_item(item, f"input[{index}]", known) for index, item in enumerate(value)]


def _referenced_items(items: list[Any], find_response: Callable[[str], Buffer]) -> dict[str, Item]:
    """Return stored items by their ids, at least those that ``items`` refer to. Raises ApiError for a missing one.

    Begins with the last reference: its response usually has the items of the others, too.
    """
    known: dict[str, Item] = {}
    lookups = 0
    for index, item in reversed([*enumerate(items)]):
        if type(item) is not dict or item.get("type") != "item_reference" or (id := _id(item)) in known:
            continue
        response = _OUTPUT_ID.fullmatch(id)
        lookups += 1
        if response and lookups <= _MAX_LOOKUPS and (entry := find_response(f"resp_{response[1]}")):
            known |= {stored["id"]: stored for stored in _stored_items(entry)}
        if lookups > _MAX_LOOKUPS:
            raise ApiError(f"'input' refers to items of more than {_MAX_LOOKUPS} responses", f"input[{index}]")
        if id not in known:
            hint = "outputs of responses are stored unless 'store' is false"
            raise ApiError(f"Item with id '{clipped(id)}' not found: {hint}", f"input[{index}].id")
    return known


def _stored_items(entry: Buffer) -> list[Item]:
    """Return the items of a stored response: its input, which includes that of earlier ones, and its output."""
    response, items = split_entry(entry)
    before: list[Item] = orjson.loads(items)
    after: list[Item] = orjson.loads(response)["output"]
    return before + after


def join_entry(response: bytes, items: Buffer) -> bytes:
    """Return the entry of the response store for a response and its input items, both JSON."""
    return b"%b%b%b" % (_LENGTH.pack(len(response)), response, bytes(items))


def split_entry(entry: Buffer) -> tuple[memoryview, memoryview]:
    """Return the response and its input items, both as JSON."""
    view = memoryview(entry)
    end = _LENGTH.size + _LENGTH.unpack_from(view)[0]
    return view[_LENGTH.size : end], view[end:]


def _read_item(item: Any, path: str, known: dict[str, Item]) -> Item:
    """Read an item; ``known`` are those that it may refer to."""
    if type(item) is not dict:
        raise wrong(path, item, "an object")
    kind = item.get("type") or "message"
    members = Fields(item, path)
    members.ignore("type", "id", "status")
    match kind:
        case "message":
            read = _read_message(members)
        case "function_call":
            members.ignore("namespace", "caller", "async")
            read = {name: members.required_text(name) for name in ("call_id", "name")}
            read["arguments"] = members.text("arguments") or "{}"
        case "function_call_output":
            members.ignore("name", "namespace", "caller")
            read = {"call_id": members.required_text("call_id"), "output": _read_content(members, "output")}
        case "item_reference":
            members.finish()
            return known[_id(item)]
        case "reasoning":
            members.ignore("encrypted_content")
            read = {name: _read_texts(members, name, kind) for name, kind in _REASONING.items()}
        case _:
            raise wrong(f"{path}.type", kind, f"{', '.join(_PREFIXES)}: this server runs no tools")
    members.finish()
    id = _id(item) or f"{_PREFIXES[kind]}_{uuid4().hex}"
    return {"type": kind, "id": id, "status": "completed", **read}


def _id(item: Item) -> str:
    given = item.get("id")
    return given if type(given) is str else ""


def _read_message(members: Fields) -> Item:
    role = one_of(members.name("role"), members.take("role"), _ROLES)
    members.ignore("phase")
    content = _read_content(members, "content")
    if type(content) is str:
        kind = "output_text" if role == "assistant" else "input_text"
        content = [{"type": kind, "text": content, **({"annotations": []} if role == "assistant" else {})}]
    return {"role": role, "content": content}


def _read_content(members: Fields, member: str) -> str | list[dict[str, Any]]:
    """Read a text or text parts."""
    path, value = members.name(member), members.required(member)
    if type(value) is str:
        return value
    if type(value) is not list:
        raise wrong(path, value, "a string or an array of parts")
    return [_read_part(part, f"{path}[{index}]") for index, part in enumerate(value)]


def _read_part(part: Any, path: str) -> dict[str, Any]:
    if type(part) is not dict:
        raise wrong(path, part, "an object")
    kind = part.get("type")
    if kind in _FOREIGN_PARTS:
        raise ApiError(f"'{path}' is an {kind}: this server has no store of files", f"{path}.type")
    members = Fields(part, path)
    if kind == "input_image":
        members.ignore("type", "prompt_cache_breakpoint")
        members.refuse("file_id")
        read = {"image_url": members.required_text("image_url"), "detail": _read_detail(members)}
        members.finish()
        return {"type": kind, **read}
    if kind == "input_audio":
        members.ignore("type", "prompt_cache_breakpoint")
        sound = members.take("input_audio")
        members.finish()
        return {"type": kind, "input_audio": sound}
    kind = one_of(f"{path}.type", kind, _TEXTS)
    members.ignore("type", "annotations", "logprobs", "prompt_cache_breakpoint")
    name = _TEXTS[kind]
    text = members.text(name)
    members.finish()
    if text is None:
        raise members.missing(name)
    kind = "input_text" if kind == "text" else kind
    return {"type": kind, name: text, **({"annotations": []} if kind == "output_text" else {})}


def _read_detail(members: Fields) -> str:
    return one_of(members.name("detail"), members.take("detail") or "auto", DETAILS)


def _read_texts(members: Fields, member: str, kind: str) -> list[dict[str, Any]]:
    """Read the parts of reasoning, all of the type ``kind``."""
    path = members.name(member)
    parts = members.array(member) or []
    for index, part in enumerate(parts):
        if type(part) is not dict or part.get("type") != kind or type(part.get("text")) is not str:
            raise wrong(f"{path}[{index}]", part, f"an object with a text, of type {kind}")
    return [{"type": kind, "text": part["text"]} for part in parts]


def chat_messages(earlier: Iterable[Item], items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return the messages of a chat for items: the reasoning, text and calls of a turn become one message.

    ``earlier`` are those of the response that the request continues. Raises ApiError for an invalid file in ``items``.
    """
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None
    named = [("previous_response_id", item) for item in earlier]
    named += [(f"input[{index}]", item) for index, item in enumerate(items)]
    for path, item in named:
        kind = item["type"]
        if kind == "function_call_output":
            turn = None
            content = _chat_content(item["output"], f"{path}.output")
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
            continue
        if kind == "message" and item["role"] != "assistant":
            turn = None
            messages.append({"role": item["role"], "content": _chat_content(item["content"], f"{path}.content")})
            continue
        if (
            turn is None
            or (kind == "message" and turn["content"])
            or (kind == "reasoning" and (turn["content"] or len(turn) > 2))
        ):
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        match kind:
            case "message":
                turn["content"] = _chat_content(item["content"], f"{path}.content")
            case "reasoning":
                turn["reasoning_content"] = "".join([part["text"] for part in item["content"] or item["summary"]])
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                turn.setdefault("tool_calls", []).append(
                    {"id": item["call_id"], "type": "function", "function": function}
                )
    return messages


def _chat_content(content: str | list[dict[str, Any]], path: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [_chat_part(part, f"{path}[{index}]") for index, part in enumerate(content)]


def _chat_part(part: dict[str, Any], path: str) -> dict[str, Any]:
    match part["type"]:
        case "input_image":
            path = f"{path}.image_url"
            return {"type": "image_url", "image_url": (path, image_file(part["image_url"], path))}
        case "input_audio":
            path = f"{path}.input_audio"
            return {"type": "input_audio", "input_audio": (path, sound_file(part["input_audio"], path))}
        case "refusal":
            return {"type": "refusal", "refusal": part["refusal"]}
    return {"type": "text", "text": part["text"]}


def list_items(entry: Buffer, query: str) -> bytes:
    """Return a list of input items of a stored response; ``query`` has OpenAI's ``limit``, ``order`` and ``after``.

    Raises ApiError for invalid values, and for an item that the response does not have.
    """
    values = dict(parse_qsl(query))
    limit, order, after = values.get("limit", str(_PAGE)), values.get("order", "desc"), values.get("after")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= _LONGEST_PAGE):
        raise wrong("limit", limit, f"a whole number from 1 to {_LONGEST_PAGE}")
    if order not in ("asc", "desc"):
        raise wrong("order", order, "asc or desc")
    _, stored = split_entry(entry)
    items: list[Item] = orjson.loads(stored)
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise ApiError(f"The response has no input item with id '{after}'", "after")
    start = 0 if after is None else ids.index(after) + 1
    end = start + int(limit)
    page = ids[start:end] or [""]
    listed = {"object": "list", "data": items[start:end], "has_more": end < len(items)}
    return orjson.dumps({**listed, "first_id": page[0], "last_id": page[-1]})
