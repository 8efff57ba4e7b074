"""Conversations become the text that transformers makes of them, and one clear error where they do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

from conch.checkpoints.tokenizers.chat import ChatTemplate, read_file, templates_of
from conch.checkpoints.tokenizers.open import open_tokenizer
from conch.core.errors import Code, ConchError, one_line
from tests.unit.checkpoints.folders import bare
from tests.unit.checkpoints.tokenizers.chat_templates import TEMPLATES
from tests.unit.checkpoints.tokenizers.tokenizers_made import byte_level

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}\n"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = (
    "{{ bos_token }}{%- if tools %}{% for tool in tools %}{{ tool | tojson }}\n"
    "{{ tool | tojson(indent=2) }}{% endfor %}"
    "{% endif %}{%- set ns = namespace(count=0) %}"
    "{%- for message in messages %}{% if message.role == 'skip' %}{% continue %}{% endif %}"
    "{% set ns.count = ns.count + 1 %}{{ message.role | upper }}: {{ message.content if message.content is defined }}"
    "{% if message.tool_calls is defined %}{{ message.tool_calls | tojson }}{% endif %}"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ eos_token }}\n{% if ns.count > 5 %}{% break %}{% endif %}{% endfor %}"
    "{% generation %}{% set inside = 1 %}-{% endgeneration %}{{ inside is defined }} {{ documents is none }}"
    "{{ enable_thinking | default('unset') }}{{ dict(a=1) | tojson }}"
)
MESSAGES: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is <b>this</b> & 日本?"}],
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}],
    [{"role": "user", "content": "a"}, {"role": "skip", "content": "x"}, {"role": "assistant", "content": "b "}],
    [{"role": "user", "content": "n", "name": None}] * 8,
]
CALLS: list[list[dict[str, Any]]] = [
    [{"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {}}}]}],
    [{"role": "assistant", "content": "x", "thinking": "because"}, {"role": "user", "content": "y"}],
]
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Wetter in <Köln>", "parameters": {}}}


def folder_with(folder: Path, template: Any, **files: str) -> Path:
    byte_level().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    for name, text in files.items():
        path = folder / name.replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("template", "tools"),
    [(CHATML, None), (CHATML, []), (TOOLS, None), (TOOLS, []), (TOOLS, [WEATHER])],
)
def test_text_is_that_of_transformers(tmp_path: Path, template: str, tools: list[Any] | None) -> None:
    transformers = pytest.importorskip("transformers")
    folder = folder_with(tmp_path, template)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = open_tokenizer(bare(folder))

    assert ours.template
    for messages in MESSAGES + (CALLS if template == TOOLS else []):
        for variables in ({}, {"enable_thinking": False}):
            wanted = theirs.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True, **variables
            )
            assert ours.chat(messages, tools=tools, **variables) == wanted


def test_tools_are_refused_where_the_template_would_leave_them_out(tmp_path: Path) -> None:
    ours = open_tokenizer(bare(folder_with(tmp_path, CHATML)))
    with pytest.raises(ConchError, match=r"^input 'tools' would have no effect: the chat template of the model has no"):
        ours.chat(MESSAGES[0], tools=[WEATHER])


NAMED = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]


@pytest.mark.parametrize(
    ("template", "files", "expected"),
    [
        ("one", {}, {"default": "one"}),
        (NAMED, {}, {"default": "plain", "tool_use": "tools"}),
        ("one", {"chat_template__jinja": "file"}, {"default": "file"}),
        (None, {"chat_template__json": '{"chat_template": "json"}'}, {"default": "json"}),
        (
            None,
            {"chat_template__jinja": "file", "additional_chat_templates/rag__jinja": "rag"},
            {"default": "file", "rag": "rag"},
        ),
        (None, {}, {}),
        (3, {}, {}),
    ],
)
def test_template_comes_from_wherever_a_checkpoint_has_it(
    tmp_path: Path, template: Any, files: dict[str, str], expected: dict[str, str]
) -> None:
    folder = folder_with(tmp_path, template, **files)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert templates_of(folder, settings) == expected


def test_conversations_with_tools_have_their_own_template(tmp_path: Path) -> None:
    with_tools = {"name": "tool_use", "template": "tools{% if tools %}{% endif %}"}
    made = open_tokenizer(bare(folder_with(tmp_path, [NAMED[0], with_tools])))
    assert made.chat(MESSAGES[0]) == "plain"
    assert made.chat(MESSAGES[0], tools=[WEATHER]) == "tools"
    assert made.chat(MESSAGES[0], chat_template="tool_use") == "tools"


def test_file_replaces_the_template(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "own", other__jinja="{{ messages[0].content }}!")
    made = open_tokenizer(bare(folder), chat_template=folder / "other.jinja")
    assert made.chat([{"role": "user", "content": "Hi"}]) == "Hi!"


def refusal(template: str | None, messages: Any = MESSAGES[0], **given: Any) -> str:
    made = ChatTemplate({} if template is None else {"default": template}, {}, "/srv/models/m")
    with pytest.raises(ConchError) as refused:
        made.render(messages, **given)
    assert "/srv" not in refused.value.message
    assert refused.value.code is Code.INVALID_ARG and "\n" not in refused.value.message
    return refused.value.message


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "the model has no chat template; send text_input, or set parameter 'chat_template'"),
        ("a\n{% if %}", "the chat template of the model has an error in line 2: Expected an expression, got"),
        ("{{ raise_exception('Roles must\nalternate') }}", "messages do not fit the chat template of the model: Roles"),
        ("{{ messages[0].content.x.y }}", "cannot render these messages: UndefinedError: "),
        ("{{ messages[0].content + 1 }}", "cannot render these messages: TypeError: "),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot render these messages: SecurityError: "),
        ("{{ messages.append(1) }}", "cannot render these messages: SecurityError: "),
        ("{% for n in range(999999999) %}{% endfor %}", "cannot render these messages: OverflowError: "),
    ],
)
def test_template_that_cannot_be_rendered_is_refused(template: str | None, message: str) -> None:
    assert message in refusal(template)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must be a list with at least one message"),
        ({"role": "user"}, "messages must be a list with at least one message"),
        (["Hello"], "messages[0] must be a JSON object with 'role' and 'content'"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], "messages[1] has no role, such as 'user'"),
    ],
)
def test_what_is_no_conversation_is_refused(messages: Any, message: str) -> None:
    assert message in refusal("x", messages)


def test_other_arguments_are_checked() -> None:
    assert refusal("x", tools={"a": 1}) == "'tools' must be a list of JSON objects, each the description of a tool"
    assert refusal("x", chat_template="rag") == "the model has no chat template 'rag', only default"


def test_error_in_any_template_is_found_before_a_conversation() -> None:
    assert ChatTemplate({"default": "{% if %}"}, {}, "m").compile() == refusal("{% if %}")
    several = ChatTemplate({"default": "x", "rag": "x\n{{ y"}, {}, "m")
    message = several.compile()
    assert "has an error in line 2: unexpected end of template" in message and message.endswith(" (template 'rag')")
    assert several.render(MESSAGES[0]) == "x"
    assert ChatTemplate({"default": "x"}, {}, "m").compile() == ""


@pytest.mark.parametrize(("name", "text"), [("t.json", "{"), ("t.json", "{}"), ("t.jinja", None)])
def test_file_that_holds_no_template_is_refused(tmp_path: Path, name: str, text: str | None) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConchError, match=name) as refused:
        read_file(tmp_path / name)
    assert refused.value.code is Code.INVALID_ARG


CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}},
}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": ["integer", "null"]}}}
TIME = {"type": "function", "function": {"name": "time", "description": "What's the time?", "parameters": PARAMETERS}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "a question": [{"role": "user", "content": "  What is <b>this</b> & 'that'?\n\nSay: 日本 🙂 "}],
    "a system message": [{"role": "system", "content": "Be short. /no_think"}, {"role": "user", "content": "Hi"}],
    "turns": [
        {"role": "system", "content": "Be\r\nbrief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello ", "reasoning_content": "why"},
        {"role": "user", "content": "And?", "name": None},
    ],
    "turns out of order": [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
    "an answer last": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes", "thinking": "mm"}],
    "calls": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": '{"rain": true}', "tool_call_id": "abcdefghi"},
        {"role": "user", "content": "Thanks"},
    ],
    "parts": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " what? "}]}],
}


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("tools", [None, [WEATHER, TIME]], ids=["no tools", "tools"])
def test_families_of_templates_render_as_in_transformers(family: str, tools: list[Any] | None) -> None:
    """The same text, or the same refusal, with and without a prompt for an answer and with what callers may add."""
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    ours = ChatTemplate({"default": TEMPLATES[family]}, tokens, "m")
    if tools and says_the_same_without(tools, TEMPLATES[family], tokens):
        with pytest.raises(ConchError, match="input 'tools' would have no effect"):
            ours.render(CONVERSATIONS["a question"], tools)
        return
    rendered = 0
    for messages in CONVERSATIONS.values():
        for given in (
            {"add_generation_prompt": False},
            {"add_generation_prompt": True, "enable_thinking": False, "controls": {"length": "short"}},
            {"add_generation_prompt": True, "documents": [{"title": "t", "text": "d"}], "reasoning_effort": "high"},
        ):
            expected = transformers_says(TEMPLATES[family], messages, tools, {**tokens, **given})
            rendered += not isinstance(expected, Exception)
            if isinstance(expected, Exception):
                with pytest.raises(ConchError) as refused:
                    ours.render(messages, tools, **given)
                assert one_line(expected) in refused.value.message
            else:
                assert ours.render(messages, tools, **given) == expected
    assert rendered >= 6


def says_the_same_without(tools: Any, template: str, tokens: dict[str, Any]) -> bool:
    said = [
        [str(transformers_says(template, messages, given, tokens)) for messages in CONVERSATIONS.values()]
        for given in (tools, None)
    ]
    return said[0] == said[1]


def transformers_says(template: str, messages: Any, tools: Any, given: dict[str, Any]) -> str | Exception:
    """What its tokenizers render, which leave out what is null; or the exception that this ends with."""
    library = pytest.importorskip("transformers.utils.chat_template_utils")
    plain = [{name: value for name, value in message.items() if value is not None} for message in messages]
    try:
        [text], _ = library.render_jinja_template([plain], tools=tools, chat_template=template, **given)
    except Exception as error:
        return error
    return str(text)


@pytest.mark.parametrize(
    "template",
    [
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns._private = 1 %}",
        "{{ messages.__class__ }}",
        "{{ dict.__class__ }}",
        "{{ ''.format.__globals__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages.pop() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ undefined_name.x }}",
        "{% include 'other' %}",
    ],
)
def test_what_a_template_may_not_do_is_refused_as_in_transformers(template: str) -> None:
    messages = [{"role": "user", "content": "a"}]
    expected = transformers_says(template, messages, None, {"add_generation_prompt": True})
    if isinstance(expected, Exception):
        assert type(expected).__name__ in refusal(template)
    else:
        assert ChatTemplate({"default": template}, {}, "m").render(messages) == expected
