"""``conch init``: creates a working model, with a test, as a starting point.

The templates are model repositories, in which ``NAME`` in a path and ``${name}`` in a file are replaced by the model's
name.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Final, NamedTuple

import click

from conch.core.errors import Code, ConchError, invalid
from conch.machine import extras
from conch.repository.single import checkpoint_source

_TEMPLATES: Final = Path(__file__).parent / "templates"
#: Names that are valid for files and tests on every system.
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class ModelTemplate(NamedTuple):
    """A template: its purpose, a request to its model, and the checkpoint that it serves by default."""

    help: str
    body: str
    streams: bool = False
    checkpoint: str = ""


TEMPLATES: Final = {
    "python": ModelTemplate("a model.py that processes each request of a batch", '{"name": "Ada"}'),
    "embedding": ModelTemplate(
        "texts to vectors, a checkpoint without code",
        '{"text_input": "The bus is late."}',
        checkpoint="sentence-transformers/all-MiniLM-L6-v2",
    ),
    "classifier": ModelTemplate(
        "texts to labels, a checkpoint without code",
        '{"text_input": "The bus is late."}',
        checkpoint="distilbert/distilbert-base-uncased-finetuned-sst-2-english",
    ),
    "ensemble": ModelTemplate("two models that the server joins", '{"text": "one two three"}'),
    "decoupled": ModelTemplate("a model.py that streams responses", '{"text": "one two three"}', streams=True),
    "bls": ModelTemplate("a model.py that calls another model", '{"text": "a few words"}'),
}


def _help() -> str:
    lines = (f"{name:<11} {template.help}" for name, template in TEMPLATES.items())
    return "Write a new model NAME that runs, with its test.\n\n\b\n" + "\n".join(lines)


@click.command("init", help=_help())
@click.argument("name")
@click.option(
    "--template",
    type=click.Choice(list(TEMPLATES)),
    default="python",
    show_default=True,
    help="The template to start from.",
)
@click.option(
    "--model-repository", type=click.Path(path_type=Path), default=Path("models"), show_default=True,
    help="Model repository to write the model to.",
)  # fmt: skip
@click.option("--model", "checkpoint", default="", help="Checkpoint of an embedding or classifier: Hub id or folder.")
def init_command(name: str, template: str, model_repository: Path, checkpoint: str) -> None:
    """Write a new working model NAME, with a test."""
    chosen = TEMPLATES[template]
    if checkpoint and not chosen.checkpoint:
        names = " and ".join(name for name, template in TEMPLATES.items() if template.checkpoint)
        raise invalid(f"--model is for the templates {names}, not for '{template}'")
    for path in write(name, template, model_repository, checkpoint):
        click.echo(f"wrote {path}")
    click.echo("\nNext:")
    for line in next_commands(name, chosen, model_repository):
        click.echo(f"  {line}")
    if chosen.checkpoint and not checkpoint:
        click.echo(f"\nThe first start or test downloads {chosen.checkpoint}; --model=FOLDER uses one on disk.")


def write(name: str, template: str, repository: Path, checkpoint: str = "") -> list[Path]:
    """Write the template's models into ``repository``; returns the files.

    Raises INVALID_ARG for an invalid name or an unwritable directory, ALREADY_EXISTS if a model's directory exists.
    """
    if not _NAME.fullmatch(name):
        raise invalid(
            f"'{name}' is not a valid model name: begin with a letter or digit, and use only letters, digits, "
            "'_', '-' and '.'"
        )
    contents = dict(_rendered(name, template, checkpoint))
    for directory in sorted({path.parts[0] for path in contents}):
        if (repository / directory).exists():
            raise ConchError(f"{repository / directory} already exists: choose another name", Code.ALREADY_EXISTS)
    try:
        for path, text in contents.items():
            (repository / path).parent.mkdir(parents=True, exist_ok=True)
            (repository / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise invalid(f"{error.filename or repository} cannot be written: {error.strerror}") from None
    return [repository / path for path in contents]


def next_commands(name: str, template: ModelTemplate, repository: Path) -> list[str]:
    """Return the commands that check, test, serve and query the model, and that install pytest if it is missing."""
    where = shlex.quote(str(repository))
    url = f"localhost:8000/v2/models/{name}/generate"
    ask = f"curl -N {url}_stream" if template.streams else f"curl {url}"
    return [
        f"conch check {where}",
        *([extras.command_for("pytest")] if find_spec("pytest") is None else ()),
        f"pytest {shlex.quote(str(repository / name))}",
        f"conch serve --model-repository={where}",
        f"{ask} -d '{template.body}'",
    ]


def _rendered(name: str, template: str, checkpoint: str) -> Iterator[tuple[Path, str]]:
    """Return the files of a template, by their paths in the repository."""
    served = checkpoint_source(checkpoint) if checkpoint else TEMPLATES[template].checkpoint
    values = {"name": name, "model": json.dumps(served, ensure_ascii=False)[1:-1]}
    root = _TEMPLATES / template
    for source in sorted(path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        directory, *inside = source.relative_to(root).parts
        # Module names cannot contain dots or dashes.
        inside[-1] = inside[-1].replace("NAME", re.sub(r"\W", "_", name))
        path = Path(directory.replace("NAME", name), *inside)
        yield path, Template(source.read_text(encoding="utf-8")).safe_substitute(values)
