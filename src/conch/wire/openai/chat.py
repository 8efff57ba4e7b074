"""Chat completions: the request, and the response as an object or chunks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import orjson

from conch.core.inference import ModelSignature
from conch.core.sampling.parameters import MAX_LOGPROBS
from conch.core.tensors import WireTensor
from conch.wire.json.text import too_deep
from conch.wire.openai.inputs import generation_inputs, text_tensor
from conch.wire.openai.media import AUDIO, AUDIO_URL, DETAILS, IMAGE, audio_file, image_file, sound_file
from conch.wire.openai.models import MESSAGES
from conch.wire.openai.reading import ApiError, Fields, one_of, wrong
from conch.wire.openai.response import (
    ChoiceDelta,
    GenerationResponse,
    OpenAiResponse,
    ResponsePlan,
    Token,
    chat_logprobs,
)
from conch.wire.openai.sampling import IGNORED, Decoding, read_marks, read_sampling, read_stream
from conch.wire.openai.tool_calls import read_tools
from conch.wire.output.events import ArgumentsDelta, OutputEvent, OutputParser, ReasoningDelta, TextDelta, ToolCallStart
from conch.wire.output.parsers import parser_for
from conch.wire.output.tools import Tools

_ROLES: Final = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
    "function": "tool",
}  # fmt: skip
#: Members of OpenAI's responses that clients send back and templates do not support.
_DROPPED: Final = ("annotations", "audio", "function_call", "refusal")


#: The files of images and recordings, by the name of the input for them, with the path of each.
MediaFiles = dict[str, list[tuple[str, bytes]]]
#: The inputs for the parts of messages that are files.
_INPUTS: Final = {"image_url": IMAGE, "input_audio": AUDIO, AUDIO_URL: AUDIO}


def read_messages(fields: Fields) -> tuple[bytes, MediaFiles]:
    """Read the messages; return them as JSON, and their files. Raises ApiError with the path of an invalid value.

    A file that has already been read is a tuple of its path and its content. The role ``developer`` becomes ``system``,
    and ``function`` becomes ``tool``. Content becomes text, or parts of type
    ``text``, ``image`` and ``audio`` if it has files. The arguments of tool calls become objects.
    """
    messages = fields.array("messages")
    if not messages:
        raise ApiError("'messages' must be an array of at least one message", "messages")
    files: MediaFiles = {}
    read = [_message(message, f"messages[{index}]", files) for index, message in enumerate(messages)]
    return orjson.dumps(read), files


#: The kinds of files, by the input for them.
_NAMES: Final = {IMAGE: "images", AUDIO: "recordings"}


def file_inputs(signature: ModelSignature, files: MediaFiles) -> dict[str, WireTensor]:
    """Return the inputs for the files of messages. Raises ApiError for a model that does not read them."""
    for name, named in files.items():
        if name not in signature.inputs:
            raise ApiError(
                f"model '{signature.name}' has no input '{name}': it does not read {_NAMES[name]}", named[0][0]
            )
    return {name: text_tensor(signature, name, [file for _, file in named]) for name, named in files.items()}


def _message(message: Any, path: str, files: MediaFiles) -> dict[str, Any]:
    if type(message) is not dict:
        raise wrong(path, message, "an object")
    role = one_of(f"{path}.role", message.get("role"), _ROLES)
    calls = message.get("tool_calls")
    content = message.get("content")
    if content is None and not calls and role != "assistant":
        raise ApiError(f"'{path}.content' is missing", f"{path}.content", reason="missing_required_parameter")
    read = {key: value for key, value in message.items() if value is not None and key not in _DROPPED}
    read["role"] = _ROLES[role]
    read["content"] = _content(content, f"{path}.content", files)
    if calls:
        if type(calls) is not list:
            raise wrong(f"{path}.tool_calls", calls, "an array")
        read["tool_calls"] = [_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(calls)]
    else:
        read.pop("tool_calls", None)
    return read


def _content(content: Any, path: str, files: MediaFiles) -> str | list[dict[str, str]]:
    if content is None:
        return ""
    if type(content) is str:
        return content
    if type(content) is not list:
        raise wrong(path, content, "a string or an array of parts")
    before = sum(map(len, files.values()))
    parts = [_part(part, f"{path}[{index}]", files) for index, part in enumerate(content)]
    if sum(map(len, files.values())) == before:
        return "\n".join([part["text"] for part in parts])
    return parts


def _part(part: Any, path: str, files: MediaFiles) -> dict[str, str]:
    kind = part.get("type") if type(part) is dict else None
    if type(kind) is str and kind in _INPUTS:
        member, input = f"{path}.{kind}", _INPUTS[kind]
        value = part.get(kind)
        if type(value) is not tuple:  # what another API's request has been translated to
            read = sound_file(value, member) if kind == "input_audio" else _addressed(value, member, input)
            value = member, read
        files.setdefault(input, []).append(value)
        return {"type": input}
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise wrong(f"{path}.type", kind, "text, image_url, input_audio or audio_url")
    text = part.get("refusal" if kind == "refusal" else "text")
    if type(text) is not str:
        raise wrong(f"{path}.text", text, "a string")
    return {"type": "text", "text": text}


def _addressed(value: Any, path: str, input: str) -> bytes:
    """Return the file of a part with a URL: an image or, for the input ``audio``, a recording."""
    if type(value) is dict:
        members = Fields(value, path)
        if input == IMAGE:
            one_of(f"{path}.detail", members.take("detail") or "auto", DETAILS)
        value, path = members.take("url"), f"{path}.url"
        members.finish()
    return image_file(value, path) if input == IMAGE else audio_file(value, path, bare=False)


def _call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if type(call) is dict else None
    if type(function) is not dict or type(function.get("name")) is not str:
        raise ApiError(f"'{path}.function.name' must be a string", f"{path}.function.name")
    arguments = function.get("arguments")
    if type(arguments) is str and not too_deep(arguments.encode()):
        try:
            orjson.loads(arguments or "{}")
            arguments = orjson.Fragment(arguments or "{}")  # with its large numbers
        except orjson.JSONDecodeError:
            pass  # the model's own text, which the template shows unchanged
    return {**call, "function": {**function, "arguments": arguments}}


_REFUSED: Final = ("audio", "prediction", "verbosity", "web_search_options")
_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
#: vLLM's member for values of the chat template, and the input for them.
TEMPLATE_VALUES: Final = "chat_template_kwargs"


class ChatForm(Protocol):
    """The form that another API gives to the response to a chat."""

    def answer(self, plan: ChatPlan, model: str) -> GenerationResponse:
        """Create the response of the model with this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPlan(ResponsePlan):
    """The plan of a chat; ``tools`` contains only the fields needed to find calls in the text.

    ``form`` is the form of the response in another API. ``structured``: the text has a structure that the request
    demands.
    """

    tools: Tools
    structured: bool
    form: ChatForm | None = None

    def answer(self, model: str) -> GenerationResponse:
        return ChatResponse(self, model) if self.form is None else self.form.answer(self, model)

    def parser(self) -> OutputParser:
        """Return a parser of the text of a choice."""
        return parser_for(self.tools, self.output_format, structured=self.structured)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(Decoding):
    """A checked chat request; ``messages`` and ``template`` (values for the chat template) are JSON.

    ``effort_only``: the values are those of ``reasoning_effort``, which has no effect for a model without the input.
    ``form`` is the form of the response in another API. ``tokenize_only``: only the tokens of the prompt are counted.
    ``drop_oldest``: the oldest messages are dropped until the prompt fits.
    """

    messages: bytes
    files: MediaFiles
    tools: Tools
    template: bytes | None
    effort_only: bool
    form: ChatForm | None = None
    tokenize_only: bool = False
    drop_oldest: bool = False

    def inputs(self, signature: ModelSignature) -> list[dict[str, WireTensor]]:
        """Return the inputs of the single request to the model. Raises ApiError for a member without an input."""
        texts = {MESSAGES: self.messages}
        for name, value in (("tools", self.tools.offered), (TEMPLATE_VALUES, self.template)):
            if value is not None:
                if name not in signature.inputs:
                    if self.tools.schema is not None if name == "tools" else self.effort_only:
                        continue  # a schema suffices for tools
                    raise ApiError(f"model '{signature.name}' has no input for '{name}'", name)
                texts[name] = value
        inputs = generation_inputs(
            signature,
            texts,
            self.sampling,
            stream=self.stream,
            logprobs=self.logprobs,
            marks=True,
            tokenize_only=self.tokenize_only,
            token_ids=self.token_ids,
            drop_oldest=self.drop_oldest,
        )
        return [inputs | file_inputs(signature, self.files)]

    @property
    def structured(self) -> bool:
        """Whether the text has a structure that the request demands."""
        return "structured_outputs" in self.sampling

    @property
    def plan(self) -> ChatPlan:
        tools = replace(self.tools, offered=None, schema=None)
        return ChatPlan(tools=tools, structured=self.structured, form=self.form, **self.common)


def read_chat(fields: Fields) -> ChatRequest:
    """Read the members of a chat, except ``model``. Raises ApiError for invalid or unknown ones."""
    messages, files = read_messages(fields)
    tools = read_tools(fields)
    streaming = read_stream(fields)
    sampling, members = read_sampling(fields)
    if tools.schema is not None:
        # A call has no content that a response_format could apply to.
        if members.get("structured_outputs", "response_format") != "response_format":
            raise ApiError(f"'tool_choice' cannot be combined with '{members['structured_outputs']}'", "tool_choice")
        sampling["structured_outputs"] = {"json": tools.schema}
        members["structured_outputs"] = "tools"
    # Without such a member, only strict tools give a request a structure.
    members.setdefault("structured_outputs", "tools")
    logprobs = _logprobs(fields)
    modalities = fields.take("modalities")
    if modalities not in (None, ["text"]):
        raise wrong("modalities", modalities, '["text"]')
    template, effort_only = _template(fields)
    marks = read_marks(fields)
    fields.refuse(*_REFUSED)
    fields.ignore(*IGNORED)
    fields.finish()
    return ChatRequest(
        messages=messages,
        files=files,
        tools=tools,
        sampling=sampling,
        members=members,
        logprobs=logprobs,
        template=orjson.dumps(template) if template else None,
        effort_only=effort_only,
        **streaming,
        **marks,
    )


def _template(fields: Fields) -> tuple[dict[str, Any], bool]:
    """Return the values for the chat template, and whether they come from ``reasoning_effort`` alone."""
    given = fields.take(TEMPLATE_VALUES)
    if given is not None and type(given) is not dict:
        raise wrong(TEMPLATE_VALUES, given, "an object")
    values: dict[str, Any] = {}
    continued = fields.flag("continue_final_message")
    if not fields.flag("add_generation_prompt", not continued):
        values["add_generation_prompt"] = False
    elif continued:
        raise ApiError(
            "'continue_final_message' cannot be combined with 'add_generation_prompt'", "continue_final_message"
        )
    if continued:
        values["continue_final_message"] = True
    values |= given or {}
    effort = fields.take("reasoning_effort")
    if effort is None:
        return values, False
    effort = one_of("reasoning_effort", effort, _EFFORTS)
    # The names that templates use: GPT-OSS the first, Qwen and GLM the second, DeepSeek and Granite the third.
    reasons = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": reasons, "thinking": reasons, **values}, not values


def _logprobs(fields: Fields) -> int | None:
    enabled = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top and not enabled:
        raise ApiError("`top_logprobs` can only be used when `logprobs` is True", "top_logprobs")
    return (top or 0) if enabled else None


def _delta(event: OutputEvent) -> dict[str, Any]:
    """Return the ``delta`` of a chunk for an event."""
    match event:
        case TextDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case ToolCallStart(index, id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}
        case ArgumentsDelta(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


@dataclass(slots=True)
class _Message:
    """The state of a choice: whether sending has ``begun``, or the parts to send at the end."""

    parser: OutputParser
    begun: bool = False
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    called: bool = False
    #: Tokens whose log-probabilities have not been sent yet.
    tokens: list[Token] = field(default_factory=list)
    #: Ids of tokens that have not been sent yet.
    ids: list[int] = field(default_factory=list)

    def events(self, piece: ChoiceDelta, end: str) -> list[OutputEvent]:
        """Return the events of a response."""
        if piece.logprobs:
            self.tokens += piece.logprobs
        self.ids += piece.token_ids or ()
        events = self.parser.feed(piece.text) if piece.text else []
        if end:
            events += self.parser.finish()
        self.called = self.called or any(type(event) is ToolCallStart for event in events)
        return events

    def keep(self, event: OutputEvent) -> None:
        """Add an event to the message."""
        match event:
            case TextDelta(text):
                self.content.append(text)
            case ReasoningDelta(text):
                self.reasoning.append(text)
            case ToolCallStart(_, id, name):
                self.calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": ""}})
            case ArgumentsDelta(index, text):
                self.calls[index]["function"]["arguments"] += text

    def reason(self, end: str) -> str:
        """Return OpenAI's finish reason."""
        return "tool_calls" if self.called and end == "stop" else end


class ChatResponse(OpenAiResponse):
    """The response to a chat; a parser divides the text of each choice into content, reasoning and tool calls."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, plan: ChatPlan, model: str) -> None:
        super().__init__(model, plan.choices, plan)
        self._logprobs = plan.logprobs is not None
        self._has_ids = plan.token_ids
        self._messages = [_Message(plan.parser()) for _ in range(plan.choices)]
        #: The ids of the tokens of the prompt, until they have been sent.
        self._prompt_ids: list[list[int]] = []
        self._knows_prompt = False

    def _chunks(self, index: int, piece: ChoiceDelta, end: str) -> list[dict[str, Any]]:
        message = self._message(index, piece)
        deltas = [_delta(event) for event in message.events(piece, end)]
        if not message.begun:
            message.begun = True
            deltas.insert(0, {"role": "assistant", "content": ""})
        if end and not (deltas and "role" not in deltas[-1]):
            deltas.append({})
        chunks: list[dict[str, Any]] = [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
        ]
        if chunks and message.tokens and "role" not in deltas[-1]:
            chunks[-1]["logprobs"] = chat_logprobs(message.tokens)
            message.tokens = []
        if chunks and message.ids:
            chunks[-1]["token_ids"], message.ids = message.ids, []
        if end:
            chunks[-1]["finish_reason"] = message.reason(end)
        return chunks

    def _message(self, index: int, piece: ChoiceDelta) -> _Message:
        if piece.prompt_ids is not None and not self._knows_prompt:
            self._knows_prompt, self._prompt_ids = True, [piece.prompt_ids]
        return self._messages[index]

    def _prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompt_ids.pop()} if self._prompt_ids else {}

    def _keep(self, index: int, piece: ChoiceDelta, end: str) -> None:
        message = self._message(index, piece)
        for event in message.events(piece, end):
            message.keep(event)

    def _choice(self, index: int) -> dict[str, Any]:
        message = self._messages[index]
        content = "".join(message.content)
        body: dict[str, Any] = {"role": "assistant", "content": content or (None if message.calls else ""),
                                "refusal": None}  # fmt: skip
        if message.reasoning:
            body["reasoning_content"] = "".join(message.reasoning)
        if message.calls:
            body["tool_calls"] = message.calls
        return {
            "index": index,
            "message": body,
            "logprobs": chat_logprobs(message.tokens) if self._logprobs else None,
            "finish_reason": message.reason(self._ends[index]),
            **({"token_ids": message.ids} if self._has_ids else {}),
        }
