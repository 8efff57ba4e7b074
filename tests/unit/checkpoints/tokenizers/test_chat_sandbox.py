"""Chat templates that would take for ever or fill the memory are refused; what real ones do is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

from conch.checkpoints.options import Options
from conch.checkpoints.tokenizers import chat_sandbox
from conch.checkpoints.tokenizers.chat import ChatTemplate
from conch.checkpoints.tokenizers.open import open_tokenizer
from conch.core.errors import ConchError
from tests.refusals import refused_argument
from tests.unit.checkpoints.folders import bare
from tests.unit.checkpoints.tokenizers.tokenizers_made import byte_level

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
#: The limit of one text in these tests (characters), so that they need not reach the real one.
MAX_TEXT = 1 << 20
#: A quarter of it.
LONG = f"{{% set long = 'x' * {MAX_TEXT // 4} %}}"


def rendered(template: str, seconds: float = 60) -> str:
    return ChatTemplate({"default": template}, {}, "m", seconds).render(MESSAGES)


def refusal(template: str, seconds: float = 60) -> str:
    return refused_argument(rendered, template, seconds)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in [1] recursive %}{{ loop([1]) if loop.depth < 50 }}{{ loop([1]) if loop.depth < 50 }}{% endfor %}",
        "{% for a in range(99999) %}{{ range(99999) | map('upper') | list | length }}{% endfor %}",
    ],
)
def test_template_that_takes_too_long_is_stopped(template: str) -> None:
    assert refusal(template, 0.2) == (
        "the chat template of the model cannot render these messages: it takes more than 0.2 seconds "
        "of processor time (parameter 'chat_template_timeout')"
    )


def test_template_that_waits_for_the_processor_is_not_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread gets no processor time: only other threads, and the clock, continue."""
    monkeypatch.setattr(chat_sandbox, "thread_time", lambda: 1.0)
    assert rendered("{% for a in range(999) %}{{ 'x' if a == 7 }}{% endfor %}", 1e-9) == "x"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 10 ** 10 }}",
        "{{ 10 ** 10 * 'x' }}",
        "{{ ([1] * 10 ** 8) | length }}",
        "{% set ns = namespace(x='x') %}{% for a in range(50) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='x') %}{% for a in range(50) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for a in range(50) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for a in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=[1]) %}{% for a in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
        "{{ ns.x | tojson }}",
        "{% set ns = namespace(x=[1]) %}{% for a in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
        "{{ ns.x | string | length }}",
        LONG + "{% for a in range(9) %}{{ long }}{% endfor %}",
        LONG + "{% macro f() %}{% for a in range(9) %}{{ long }}{% endfor %}{% endmacro %}{{ f() | length }}",
        LONG + "{{ [long, long, long, long, long] | join | length }}",
        LONG + "{{ ','.join([long, long, long, long, long]) | length }}",
        LONG + "{{ long.replace('x', 'xxxxx') | length }}",
        LONG + "{{ long | replace('x', 'xxxxx') | length }}",
        LONG + "{{ '%s%s%s%s%s' % (long, long, long, long, long) }}",
        LONG + "{{ '{0}{0}{0}{0}{0}'.format(long) }}",
        "{{ [{'a': 1}] | tojson(indent=100000000) }}",
        "{{ 'x'.center(10 ** 10) }}",
        "{{ 'x'.ljust(width=10 ** 10) }}",
        "{{ '\t'.expandtabs(10 ** 10) }}",
        "{{ (1).to_bytes(10 ** 10, 'big') }}",
        "{{ strftime_now('%9999999Y' * 100000) }}",
    ],
)
def test_template_that_makes_too_much_text_is_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_sandbox, "MAX_TEXT", MAX_TEXT)
    assert f"it creates texts of more than {MAX_TEXT} characters" in refusal(template)


def test_a_text_may_have_64_million_characters() -> None:
    assert rendered("{{ ('x' * 67108864) | length }}") == "67108864"
    assert "it creates texts of more than 67108864 characters" in refusal("{{ 'x' * 67108865 }}")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 10 ** (10 ** 10) }}", "it computes a number of more than 65536 bits"),
        ("{{ 'x' | center(10000000000) }}", "it gives filter 'center' a number of more than 10000"),
        ("{{ 'x\ny' | indent(10000000000) }}", "it gives filter 'indent' a number of more than 10000"),
        ("{{ [1] | batch(10000000000, 0) | list }}", "it gives filter 'batch' a number of more than 10000"),
        ("{{ 1 | round(1000000000, 'ceil') }}", "it gives filter 'round' a number of more than 10000"),
        ("{{ '%1000000000d' % 1 }}", "it has a format with a width of more than four digits"),
        ("{{ '%.1000000000f' | format(1) }}", "it has a format with a width of more than four digits"),
        ("{{ '%*d' % (1000000000, 1) }}", "it has a format with a width of more than four digits"),
        ("{{ '{:>1000000000}'.format(1) }}", "it has a format with a width of more than four digits"),
        ("{{ '{:.{}f}'.format(1, 1000000000) }}", "it has a format with a width of more than four digits"),
        ("{{ '{a:1000000000}'.format_map({'a': 1}) }}", "it has a format with a width of more than four digits"),
        ("{{ 'x'.translate({120: 'xxxxx'}) }}", "it calls translate"),
        ("{{ [[1], [2]] | sum(start=[]) }}", "it adds values that are not numbers"),
        ("{{ lipsum(n=1000000) }}", "UndefinedError: 'lipsum' is undefined"),
    ],
)
def test_number_that_would_take_the_memory_or_the_time_is_refused(template: str, reason: str) -> None:
    assert f"cannot render these messages: {reason}" in refusal(template)


@pytest.mark.parametrize("template", ["{% for a in [1] %}" * 60 + "{% endfor %}" * 60, "x" * (1 << 20) + "x"])
def test_template_that_cannot_be_compiled_is_refused(template: str) -> None:
    assert "the chat template of the model " in refusal(template)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ '=' * 40 }}{{ 2 ** 10 }}{{ [0] * 3 }}", "=" * 40 + "1024[0, 0, 0]"),
        ("{{ 1 ~ 'a' ~ [2] ~ none ~ true }}", "1a[2]NoneTrue"),
        ("{{ '%05.1f %s%%' % (2.55, 'x') }}", "002.5 x%"),
        ("{{ '**{}** 20240101 {:>5}'.format('a', 1) }}", "**a** 20240101     1"),
        ("{{ 'a-b' | replace('-', '+') | center(7) }}|{{ 'a\nb' | indent(2) }}", "  a+b  |a\n  b"),
        ("{{ [1, 2] | join(', ') }}{{ [{'n': 2}] | sum(attribute='n') }}{{ messages | map(attribute='role') | join }}",
         "1, 22user"),
        ("{{ 2.567 | round(2) }}{{ [1, 2, 3] | batch(2) | list }}", "2.57[[1, 2], [3]]"),
        ("{% for a in range(5) if a is odd %}{{ loop.index }}{{ a }}{% else %}none{% endfor %}", "1123"),
        ("{% macro f() %}<{{ caller() if caller }}>{% endmacro %}{{ f() }}{% call f() %}c{% endcall %}", "<><c>"),
        ("{% filter upper %}{{ messages[0].content }}{% endfilter %}", "HI"),
        ("{{ 'a'.join(['1', '2']) }}{{ 'x'.rjust(3) }}{{ 'abc'.replace('b', '--') }}", "1a2  xa--c"),
    ],
)  # fmt: skip
def test_what_templates_usually_do_is_as_jinja2_does_it(template: str, text: str) -> None:
    assert rendered(template) == text


def test_rendering_that_was_refused_leaves_nothing_to_the_next() -> None:
    refusal("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", 0.2)
    assert rendered("{% for a in range(99) %}{% endfor %}done") == "done"


def test_time_is_a_parameter(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    checkpoint = bare(tmp_path)
    assert open_tokenizer(checkpoint).template.seconds == 5
    checkpoint.options = Options.from_values({"chat_template_timeout": "0.5"})
    assert open_tokenizer(checkpoint).template.seconds == 0.5
    checkpoint.options = Options.from_values({"chat_template_timeout": "0"})
    with pytest.raises(ConchError, match="'chat_template_timeout' is 0; it must be more than 0"):
        open_tokenizer(checkpoint)
