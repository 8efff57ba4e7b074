"""The chat template of a model: renders messages to the prompt format that the model was trained on.

The thread that reads requests renders templates. Templates come from checkpoints and are untrusted, so they run in
jinja2's sandbox. They get the same variables as in transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from conch.config.reading import read_small
from conch.core.errors import ConchError, error_text, invalid, one_line
from conch.machine import extras

#: Default of the parameter ``chat_template_timeout`` (s of processor time).
SECONDS: Final = 5.0
#: The maximum number of characters in a template; real templates have tens of thousands.
MAX_TEMPLATE: Final = 1 << 20
#: Names of the reasoning in a message.
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
#: Names of the default template and of the template for conversations with tools.
_DEFAULT: Final = "default"
_WITH_TOOLS: Final = "tool_use"


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A compiled template, and whether it uses the variable ``tools``."""

    render: Callable[..., str]
    tools: bool


@dataclass(slots=True)
class ChatTemplate:
    """The chat templates of a model by name; may be empty.

    ``tokens`` has the texts of special tokens by role (such as ``bos_token``); ``source`` is the name of the model in
    errors; ``seconds`` limits the processor time of a rendering. If ``replaced``, the templates are those that the
    parameter ``chat_template`` names.
    """

    templates: Mapping[str, str]
    tokens: Mapping[str, str]
    source: str
    seconds: float = SECONDS
    replaced: bool = False
    _compiled: dict[str, _Compiled] = field(default_factory=dict, repr=False)

    def __bool__(self) -> bool:
        return bool(self.templates)

    def compile(self, extra: str = "") -> str:
        """Compile all templates; returns the first error in them, or an empty text.

        Raises UNSUPPORTED, with the command that installs ``extra``, if there are templates but jinja2 is missing, and
        INVALID_ARG for an error in templates that a parameter names.
        """
        if self.templates:
            extras.require(f"the chat template of model '{self.source}'", "jinja2", extra=extra)
        for name in self.templates:
            try:
                self._compiled_template(name)
            except ConchError as error:
                if self.replaced:
                    raise invalid(f"parameter 'chat_template': {error.message}") from None
                return error.message if name == _DEFAULT else f"{error.message} (template '{name[:100]}')"
        return ""

    def render(self, messages: Any, tools: Any = None, *, optional_tools: bool = False, **variables: Any) -> str:
        """Render a conversation, followed by the beginning of the assistant's message.

        ``optional_tools``: a template that has no place for ``tools`` is rendered without them.
        If ``variables`` have ``continue_final_message``, it ends with the text of the last message, as in transformers.
        ``variables`` are passed to the template, except ``chat_template``, which selects a template by name. Raises
        INVALID_ARG for invalid messages, for messages that the template rejects, and for tools if the template ignores
        them.
        """
        check_messages(messages)
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise invalid("'tools' must be a list of JSON objects, each the description of a tool")
        compiled = self._template(variables.pop("chat_template", None), tools)
        if tools and not compiled.tools and not optional_tools:
            raise invalid("input 'tools' would have no effect: the chat template of the model has no place for tools")
        from conch.checkpoints.tokenizers.chat_sandbox import TooMuch, limited

        values = {"add_generation_prompt": True, "documents": None, **self.tokens, **variables}
        final = _final_text(messages) if values.pop("continue_final_message", False) else ""
        try:
            with limited(self.seconds):
                text = compiled.render(messages=[_plain(message) for message in messages], tools=tools, **values)
        except TooMuch as error:
            raise invalid(f"the chat template of the model cannot render these messages: {error}") from None
        except Exception as error:
            raise _refused(error) from None
        at = text.rfind(final)
        if at < 0:
            raise invalid("the chat template of the model changes the last message, so that it cannot be continued")
        return text[: at + len(final)] if final else text

    def _template(self, selected: Any, tools: Any) -> _Compiled:
        if not self.templates:
            raise invalid("the model has no chat template; send text_input, or set parameter 'chat_template'")
        name = selected
        if selected is None:
            name = _WITH_TOOLS if tools is not None and _WITH_TOOLS in self.templates else _DEFAULT
        if not isinstance(name, str) or name not in self.templates:
            raise invalid(f"the model has no chat template '{str(name)[:100]}', only {', '.join(self.templates)}")
        return self._compiled_template(name)

    def _compiled_template(self, name: str) -> _Compiled:
        if name not in self._compiled:
            self._compiled[name] = _compile(self.templates[name])
        return self._compiled[name]


def _final_text(messages: list[dict[str, Any]]) -> str:
    """Return the text of the last message without white space around it. Raises INVALID_ARG if it has none."""
    content = messages[-1].get("content")
    text = content.strip() if isinstance(content, str) else ""
    if not text:
        raise invalid("the last message has no text to continue", "messages")
    return text


def check_messages(messages: Any) -> None:
    """Raise INVALID_ARG unless ``messages`` is a non-empty list of objects with a role, whose parts are objects."""
    if not isinstance(messages, list) or not messages:
        raise invalid(
            'messages must be a list with at least one message, such as [{"role": "user", "content": "Hello"}]'
        )
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise invalid(f"messages[{index}] must be a JSON object with 'role' and 'content'")
        if not isinstance(message.get("role"), str):
            raise invalid(f"messages[{index}] has no role, such as 'user'")
        content = message.get("content")
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if not isinstance(part, dict) or not isinstance(part.get("type", ""), str):
                raise invalid(f"messages[{index}].content[{number}] must be a JSON object whose 'type' is a text")


def templates_of(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates of a checkpoint by name; ``settings`` is its tokenizer_config.json."""
    templates = _named(settings.get("chat_template"))
    legacy = directory / "chat_template.json"
    if legacy.is_file():
        templates |= read_file(legacy)
    main = directory / "chat_template.jinja"
    others = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    if main.is_file() or others:
        files = {_DEFAULT: main} if main.is_file() else {}
        templates = {name: _read(path) for name, path in (files | {path.stem: path for path in others}).items()}
    return templates


def read_file(path: Path) -> dict[str, str]:
    """Read the templates in a jinja file, or in a JSON file with ``chat_template``. Raises INVALID_ARG."""
    text = _read(path)
    if path.suffix != ".json":
        return {_DEFAULT: text}
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(f"chat template {path} cannot be read: {one_line(error)}") from None
    templates = _named(document.get("chat_template") if isinstance(document, dict) else None)
    if not templates:
        raise invalid(f"chat template {path} must be a JSON object with 'chat_template'")
    return templates


def _named(value: Any) -> dict[str, str]:
    """Return the templates by name in a ``chat_template``: a text, a list of named templates, or an object of them."""
    match value:
        case str():
            return {_DEFAULT: value}
        case list():
            pairs = [
                (template.get("name"), template.get("template")) for template in value if isinstance(template, dict)
            ]
        case dict():
            pairs = list(value.items())
        case _:
            return {}
    return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}


def _read(path: Path) -> str:
    try:
        return read_small(path).decode("utf-8")
    except (OSError, ValueError) as error:
        raise invalid(f"chat template {path} cannot be read: {one_line(error)}") from None


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a message for templates: remove null members, and add the names that templates use for reasoning."""
    plain = {name: value for name, value in message.items() if value is not None}
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _compile(text: str) -> _Compiled:
    import jinja2

    from conch.checkpoints.tokenizers.chat_sandbox import environment

    if len(text) > MAX_TEMPLATE:
        raise invalid(f"the chat template of the model has {len(text)} characters; at most {MAX_TEMPLATE} are read")
    try:
        names = environment().parse(text).find_all(jinja2.nodes.Name)
        return _Compiled(environment().from_string(text).render, any(name.name == "tools" for name in names))
    except jinja2.TemplateSyntaxError as error:
        raise invalid(
            f"the chat template of the model has an error in line {error.lineno}: {one_line(error)}"
        ) from None
    except (RecursionError, SyntaxError, MemoryError):  # from Python, because templates are compiled to Python code
        raise invalid("the chat template of the model is nested too deeply") from None


def _refused(error: Exception) -> ConchError:
    # Errors that a template itself raises are messages for the client.
    if type(error).__name__ == "TemplateError":
        return invalid(f"messages do not fit the chat template of the model: {one_line(error)}")
    reason = error_text(error, short=True)
    return invalid(f"the chat template of the model cannot render these messages: {reason}")
