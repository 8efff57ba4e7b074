"""A page with a false statement fails, and so does a block of an unknown kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from conch.core.errors import ConchError
from tests.docs.expected import appears, shows
from tests.docs.page import Kind, PageStep, commands, steps
from tests.docs.walk import PageWalk


def page(folder: Path, text: str) -> list[PageStep]:
    source = folder / "page.md"
    source.write_text(text)
    return steps(source)


def walk(folder: Path, text: str) -> None:
    found = page(folder, text)
    (folder / "walk").mkdir()
    with PageWalk("page.md", folder / "walk") as reader:
        for step in found:
            if not step.reason:
                reader.take(step)


def test_kinds_follow_from_the_language_and_the_line_before(tmp_path: Path) -> None:
    text = (
        "# T\n\nIts text. `a/b.txt`:\n\n```\nx\n```\n\nTyped:\n\n```\n$ ls\n```\n\n    ls -l\n\n"
        "```python\nprint(1)\n```\n\nIt prints:\n\n```text\n1\n```\n\n```pbtxt\nname: 'x'\n```\n\n"
        "```text\nsaid\n```\n\nIn `config.pbtxt`:\n\n```\n?\n```\n"
    )
    assert [step.kind for step in page(tmp_path, text)] == [
        Kind.FILE, Kind.SESSION, Kind.SESSION, Kind.PROGRAM, Kind.OUTPUT, Kind.FRAGMENT, Kind.TEXT, Kind.UNKNOWN,
    ]  # fmt: skip


def test_a_reason_holds_for_the_next_block_or_before_the_title_for_all(tmp_path: Path) -> None:
    one, other = page(tmp_path, "# T\n<!-- not run: long -->\n```sh\nls\n```\n\n```sh\nls\n```\n")
    assert (one.reason, other.reason) == ("long", "")
    assert {step.reason for step in page(tmp_path, "<!-- not run: long -->\n# T\n```sh\nls\n```\n\n    ls\n")} == {
        "long"
    }


def test_commands_continue_over_lines_and_keep_their_outputs(tmp_path: Path) -> None:
    session = page(tmp_path, "```\n$ echo 'a\n b' \\\n  c\na\n b c\n\n$ cat <<END\nx\nEND\n$ true\n```\n")[0]
    assert [(command.text, command.output) for command in commands(session)] == [
        ("echo 'a\n b' \\\n  c", "a\n b c"),
        ("cat <<END\nx\nEND", None),
        ("true", None),
    ]


@pytest.mark.parametrize(
    ("shown", "output", "same"),
    [
        ("a … c", "a b\nb c", True),
        ("a", "a b", False),
        ('{"score":0.8675625324249268}', '{"score":0.8675627112388611}', True),
        ('{"score":0.8675625324249268}', '{"score":0.7675625324249268}', False),
        ("[0.0066…]", "[0.00662110885605216,-0.1]", True),
    ],
)
def test_what_varies_is_left_open_and_numbers_are_compared(shown: str, output: str, same: bool) -> None:
    assert shows(shown, output) is same


def test_part_of_a_log_appears_in_it() -> None:
    assert appears("it is …\nready", "x\nit is 1 s\nready\ny")


def test_a_page_with_a_wrong_output_a_failing_command_or_a_wrong_fragment_fails(tmp_path: Path) -> None:
    for number, wrong in enumerate(["```\n$ echo 1\n2\n```\n", "    false\n", "```pbtxt\nnaem: 'x'\n```\n"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises((AssertionError, ConchError), match=r"page\.md:\d"):
            walk(folder, wrong)


def test_files_are_there_for_later_commands(tmp_path: Path) -> None:
    walk(tmp_path, "`a/b.txt`:\n\n```\nhello\n```\n\n```\n$ cat a/b.txt\nhello\n```\n")
