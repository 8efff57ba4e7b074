"""The parsers of generated texts, and the choice of the parser for a conversation.

Text that only resembles a call stays text. Marks inside reasoning are part of the reasoning.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import groupby
from typing import Final

from conch.wire.output.calls import BlockReader, Calls, ObjectReader
from conch.wire.output.events import OutputEvent, OutputParser, ReasoningDelta, TextDelta, TextParser, ToolCallStart
from conch.wire.output.formats import Block, OutputFormat, load
from conch.wire.output.tools import Tools
from conch.wire.output.values import ValueReader, partial, pieces

#: Prefixes of a call without a mark, without white space.
_BARE: Final = (
    '{"name":', '[{"name":', '{"type":"function",', '[{"type":"function",', '{"arguments":', '{"parameters":',
    '{"function":',
)  # fmt: skip
_PYTHON: Final = re.compile(r"\[(?P<name>[A-Za-z_][\w.-]*)\(")
_PYTHON_START: Final = re.compile(r"\[(?:[A-Za-z_][\w.-]{0,127})?")
_SPACE: Final = re.compile(r"\s+")
#: The number of characters that show whether a call without a mark begins.
_MOST: Final = 200


def parser_for(tools: Tools, output_format: str = "", *, structured: bool = False) -> OutputParser:
    """Return the parser of a choice.

    ``output_format`` is the one of the model's signature, empty for a model that does not report it. ``structured``:
    the text has a structure that the request demands, so it is the answer.
    """
    known = load(output_format)
    forced: OutputParser | None = None
    if tools.mode == "required":
        forced = ListParser(tools)
    elif tools.mode == "named":
        forced = ArgumentsParser(tools)
    elif structured:
        forced = TextParser()
    if forced is not None:
        return ReasonedParser(known.reasoning, forced) if known.reasoning else forced
    if known.calls == "harmony":
        return ChannelParser(tools)
    if tools.mode == "none" and not known.reasoning and not known.call_format.special:
        return TextParser()
    return MarkParser(tools, known)


class MarkParser:
    """Parses a text in which marks begin and end reasoning and calls.

    Reasoning, and calls without a mark, begin only where no answer has begun: at the beginning, and after reasoning or
    a call.
    """

    def __init__(self, tools: Tools, output_format: OutputFormat) -> None:
        calls, offered = output_format.call_format, tools.mode == "auto"
        self._calls = Calls(tools)
        self._names = tools.parameters.keys()
        self._blocks = calls.blocks if offered else {}
        self._bare = calls.bare if offered else None
        self._open, self._close = output_format.reasoning or ("", "")
        #: Special tokens, which are never content.
        self._special = {*(calls.tokens if calls.special else ()), *output_format.answer}
        self._marks = tuple(
            sorted({*self._blocks, *self._special, *output_format.reasoning}, key=len, reverse=True)
        )  # fmt: skip
        self._pattern = re.compile("|".join(map(re.escape, self._marks)))
        self._pending = ""
        #: White space that is part of a text only if more of it follows, and whether a mark has followed.
        self._space: list[str] = []
        self._marked = False
        self._reader: BlockReader | None = None
        #: The mark of the block that is read; empty for a block without one.
        self._mark = ""
        self._reasons = False
        #: Whether the answer has not begun, and whether white space before it is left out.
        self._fresh = True
        self._trims = False

    def feed(self, text: str) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        for piece in pieces(text):
            self._pending += piece
            while self._step(events):
                pass
        return _joined(events)

    def finish(self) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        while self._reader is not None:
            events += self._reader.finish()
            self._end_block(self._reader, events)
            while self._step(events):
                pass
        if not self._marked:
            self._pending = "".join([*self._space, self._pending])
            self._space.clear()
        self._pass_on(self._pending, events)
        return _joined(events)

    def _step(self, events: list[OutputEvent]) -> bool:
        """Read the next part; False if more text is needed."""
        if self._reader is not None:
            text, self._pending = self._pending, ""
            events += self._reader.feed(text)
            return self._end_block(self._reader, events)
        text = self._pending.lstrip()
        if len(text) < len(self._pending) and not self._trims:
            self._space.append(self._pending[: len(self._pending) - len(text)])
            self._marked = False
        self._pending = text
        if not text:
            return False
        return self._read_reasoning(events) if self._reasons else self._begin_bare() or self._read_text(events)

    def _end_block(self, reader: BlockReader, events: list[OutputEvent]) -> bool:
        """Continue after a block that has ended; False if it has not."""
        if reader.state == "reading":
            return False
        self._reader = None
        self._pending = reader.rest
        if reader.state == "ended":
            self._space.clear()
            self._fresh = self._trims = True
        else:
            self._fresh = False
            self._pass_on(self._pattern.sub(self._shown, self._mark + reader.text), events)
        return True

    def _shown(self, match: re.Match[str]) -> str:
        """Return a mark within text; empty for a special token."""
        return "" if match.group() in self._special else match.group()

    def _begin_bare(self) -> bool:
        """Begin a block without a mark if the text begins with a call."""
        if self._bare is None or not self._fresh or not self._begins_call():
            return False
        self._reader, self._mark = BlockReader(self._bare, self._calls, self._names), ""
        return True

    def _begins_call(self) -> bool:
        compact = _SPACE.sub("", self._pending[:_MOST])
        call = _PYTHON.match(compact)
        return compact.startswith(_BARE) or (call is not None and call["name"] in self._names)

    def _may_begin_call(self) -> bool:
        if self._bare is None or not self._fresh or len(self._pending) >= _MOST:
            return False
        compact = _SPACE.sub("", self._pending)
        return any(start.startswith(compact) for start in _BARE) or _PYTHON_START.fullmatch(compact) is not None

    def _read_text(self, events: list[OutputEvent]) -> bool:
        if self._may_begin_call():
            return False
        match = self._pattern.search(self._pending)
        while match is not None and self._is_text(match):
            match = self._pattern.search(self._pending, match.end())
        if match is None:
            sure = len(self._pending) - partial(self._pending, self._marks)
            sure = len(self._pending[:sure].rstrip())
            text, self._pending = self._pending[:sure], self._pending[sure:]
            self._pass_on(text, events)
            return False
        mark, text = match.group(), self._pending[: match.start()]
        self._pending = self._pending[match.end() :]
        shown = text.rstrip()
        self._pass_on(shown, events)
        self._space.append(text[len(shown) :])
        self._marked = True
        if mark in self._blocks:
            block = self._blocks[mark]
            self._reader, self._mark = BlockReader(block, self._calls), mark
            if block.keeps_mark:
                self._reader.begin(mark)
        elif mark == self._open:
            self._reasons = self._trims = True
            self._space.clear()
        return True

    def _is_text(self, match: re.Match[str]) -> bool:
        """Whether a mark of reasoning is text, because an answer precedes it."""
        begun = not self._fresh or bool(self._pending[: match.start()].strip())
        return begun and match.group() in (self._open, self._close) and match.group() not in self._special

    def _read_reasoning(self, events: list[OutputEvent]) -> bool:
        end = self._pending.find(self._close)
        sure = end if end >= 0 else len(self._pending) - partial(self._pending, (self._close,))
        text = self._pending[:sure].rstrip()
        self._pass_on(text, events)
        if end < 0:
            self._pending = self._pending[len(text) :]
            return False
        self._pending = self._pending[end + len(self._close) :]
        self._space.clear()
        self._reasons = False
        self._fresh = self._trims = True
        return True

    def _pass_on(self, text: str, events: list[OutputEvent]) -> None:
        """Pass on text of the reasoning or the answer, after the white space before it."""
        if text:
            text = "".join([*self._space, text])
            events.append(ReasoningDelta(text) if self._reasons else TextDelta(text))
            self._space.clear()
            self._fresh = self._trims = False


class ReasonedParser:
    """Parses a text that may begin with reasoning between two ``marks``; ``parser`` gets the text after it."""

    def __init__(self, marks: tuple[str, ...], parser: OutputParser) -> None:
        self._marks = MarkParser(Tools(), OutputFormat(reasoning=marks))
        self._parser = parser

    def feed(self, text: str) -> list[OutputEvent]:
        return self._parsed(self._marks.feed(text))

    def finish(self) -> list[OutputEvent]:
        return self._parsed(self._marks.finish()) + self._parser.finish()

    def _parsed(self, events: list[OutputEvent]) -> list[OutputEvent]:
        parsed: list[OutputEvent] = []
        for event in events:
            parsed += self._parser.feed(event.text) if isinstance(event, TextDelta) else [event]
        return parsed


class ListParser:
    """Parses a text that is a JSON list of calls."""

    def __init__(self, tools: Tools) -> None:
        self._reader = BlockReader(Block(objects=True), Calls(tools))

    def feed(self, text: str) -> list[OutputEvent]:
        return _joined([event for piece in pieces(text) for event in self._reader.feed(piece)])

    def finish(self) -> list[OutputEvent]:
        events = self._reader.finish()
        text = self._reader.text + self._reader.rest
        compact = _SPACE.sub("", text)
        if self._reader.state == "failed" and not any(start.startswith(compact) for start in _BARE):
            events.append(TextDelta(text))
        return events


class ArgumentsParser:
    """Parses a text that is the arguments of a single function."""

    def __init__(self, tools: Tools) -> None:
        self._name = tools.name
        self._calls = Calls(tools)
        self._reader = ValueReader()

    def feed(self, text: str) -> list[OutputEvent]:
        events = [] if self._calls.any else self._calls.begin(self._name)
        return events + self._calls.arguments(self._reader.feed(text))

    def finish(self) -> list[OutputEvent]:
        events = [] if self._calls.any else self._calls.begin(self._name)
        if self._reader.rest is None:
            events += self._calls.arguments(self._reader.finish() or "{}")
        return events


def _joined(events: list[OutputEvent]) -> list[OutputEvent]:
    """Return the events with one event in place of consecutive parts of the same text."""
    joined: list[OutputEvent] = []
    for _, group in groupby(events, lambda event: (type(event), getattr(event, "index", 0))):
        first, *more = group
        texts = [event.text for event in more if not isinstance(event, ToolCallStart)]
        joined.append(first if isinstance(first, ToolCallStart) else replace(first, text="".join([first.text, *texts])))
    return joined


_START: Final = "<|start|>"
_CHANNEL: Final = "<|channel|>"
_MESSAGE: Final = "<|message|>"
#: Marks that end a message or a header, and all marks that end a message.
_LAST: Final = ("<|end|>", "<|call|>", "<|return|>")
_ENDS: Final = (*_LAST, _START, _CHANNEL)
#: All marks; the others are left out of a message.
_MARKS: Final = (*_ENDS, _MESSAGE, "<|constrain|>")
_END: Final = re.compile("|".join(map(re.escape, _MARKS)))
_HEADER_END: Final = re.compile("|".join(map(re.escape, (_MESSAGE, *_LAST))))
_RECIPIENT: Final = re.compile(r"\bto=([^\s<]+)")
_NAME: Final = re.compile(r"<\|channel\|>\s*(\w+)")
#: Beginnings of a header, in front of its first mark.
_HEADERS: Final = ("assistant", "to=", _CHANNEL, _START, _MESSAGE)
#: The maximum number of characters of a header; a longer text is a message.
_LONGEST_HEADER: Final = 400
#: The parts of a header that are not text. The last mark may be cut off.
_PARTS: Final = re.compile(r"<\|(?:start|channel|constrain)\|>\s*\w*|<\|message\|>|\bto=[^\s<]+|<(?:\|\w*\|?)?\Z")


class ChannelParser:
    """Parses harmony, the output format of GPT-OSS: messages in channels. Text without a header is the answer.

    A message is ``<|start|>assistant<|channel|>CHANNEL<|message|>TEXT`` up to ``<|end|>``, ``<|call|>`` or
    ``<|return|>``; the prompt has the first ``<|start|>assistant``. The channel ``analysis`` is the reasoning, a
    message with a recipient (``to=functions.NAME``) is a call, and the others are the answer. Messages of the same kind
    are separated by an empty line. Source: OpenAI's description of harmony.
    """

    def __init__(self, tools: Tools) -> None:
        self._calls = Calls(tools)
        self._offered = tools.mode == "auto"
        self._pending = ""
        #: The type of the current message's events; None in a header.
        self._event: type[TextDelta] | type[ReasoningDelta] | None = None
        self._arguments: ObjectReader | None = None
        #: The kinds of messages that have text, and whether the current one has.
        self._written: set[type[TextDelta] | type[ReasoningDelta]] = set()
        self._begun = False

    def feed(self, text: str) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        for piece in pieces(text):
            self._pending += piece
            while self._read_header(events) if self._event is None else self._read_message(events):
                pass
        return events

    def finish(self) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        if self._event is None:
            self._begin_message(len(self._pending))
        self._pass_on(len(self._pending), events)
        self._end_message(events)
        return events

    def _read_header(self, events: list[OutputEvent]) -> bool:
        """Read up to the text of a message; False if more text is needed."""
        self._pending = self._pending.lstrip()
        begins = any(self._pending.startswith(start) for start in _HEADERS)
        end = _HEADER_END.search(self._pending, 0, _LONGEST_HEADER) if begins else None
        if end is not None and end.group() == _MESSAGE:
            header, self._pending = self._pending[: end.start()], self._pending[end.end() :]
            recipient = _RECIPIENT.search(header)
            self._event = _kind(header)
            if recipient is not None and self._offered:
                self._arguments = ObjectReader()
                events += self._calls.begin(recipient[1].removeprefix("functions."))
            return True
        if end is not None:
            self._begin_message(end.start())
            return True
        if begins and len(self._pending) >= _LONGEST_HEADER:
            self._begin_message(_LONGEST_HEADER - partial(self._pending[:_LONGEST_HEADER], _MARKS))
            return True
        if begins or any(start.startswith(self._pending) for start in _HEADERS):
            return False
        self._event = TextDelta
        return True

    def _begin_message(self, end: int) -> None:
        """Make the first ``end`` characters, a header that no message follows, the beginning of a message."""
        header = self._pending[:end]
        self._event = _kind(header)
        if any(mark in header for mark in _MARKS):
            self._pending = _PARTS.sub("", header).lstrip() + self._pending[end:]

    def _read_message(self, events: list[OutputEvent]) -> bool:
        """Read the text of a message; False if more text is needed."""
        end = _END.search(self._pending)
        if end is None:
            self._pass_on(len(self._pending) - partial(self._pending, _MARKS), events)
            return False
        self._pass_on(end.start(), events)
        mark = end.group()
        self._pending = self._pending if mark in (_START, _CHANNEL) else self._pending[len(mark) :]
        if mark in _ENDS:
            self._end_message(events)
        return True

    def _pass_on(self, end: int, events: list[OutputEvent]) -> None:
        """Pass on the first ``end`` characters."""
        text, self._pending = self._pending[:end], self._pending[end:]
        if self._arguments is not None:
            events += self._calls.arguments(self._arguments.feed(text))
        elif text and self._event is not None:
            separator = "\n\n" if not self._begun and self._event in self._written else ""
            events.append(self._event(separator + text))
            self._begun = True
            self._written.add(self._event)

    def _end_message(self, events: list[OutputEvent]) -> None:
        if self._arguments is not None and self._arguments.rest is None:
            events += self._calls.arguments(self._arguments.finish() or "{}")
        self._event, self._arguments, self._begun = None, None, False


def _kind(header: str) -> type[TextDelta] | type[ReasoningDelta]:
    """Return the type of the events for the message after ``header``."""
    channel = _NAME.search(header)
    return ReasoningDelta if channel is not None and channel[1] == "analysis" else TextDelta
