"""Structured output by llguidance: whatever is sampled fits, and what does not compile is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("llguidance")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from conch.backends.batching import grammars
from conch.backends.generation.engine import EngineRequest, GenerationEngine
from conch.checkpoints.tokenizers.chat import ChatTemplate
from conch.checkpoints.tokenizers.fast import FastTokenizer, token_bytes
from conch.checkpoints.tokenizers.tokenizer import SpecialTokens
from conch.core.errors import Code, ConchError
from conch.core.sampling.parameters import Feature, ReasoningTokens, SamplingParams
from conch.core.sampling.structures import Structure, structure_of
from tests.unit.backends.batching import schemas
from tests.unit.backends.batching.test_generated_schemas import Maker
from tests.unit.backends.engines.driving import finished, finished_by_id, tokens
from tests.unit.backends.engines.transformers.models import opened, spec, write

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer", "maximum": 999}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("structured")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate(["<pad>", "<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    # Networks often have more ids than their tokenizers.
    return write(folder, "llama", vocab_size=len(vocabulary) + 5)


def tokenizer_with(folder: Path, *chain: Any) -> FastTokenizer:
    """The tokenizer of the model in ``folder``, with a decoder that is a ``chain`` of others."""
    fast: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if chain:
        fast.decoder = decoders.Sequence(list(chain))
    return FastTokenizer(fast, SpecialTokens(all_ids=frozenset((0, 1, 2))), ChatTemplate({}, {}, ""))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> FastTokenizer:
    return tokenizer_with(folder)


@pytest.fixture(scope="module")
def engine(folder: Path, tokenizer: FastTokenizer) -> GenerationEngine:
    return opened(folder, tokenizer=tokenizer)


def test_the_log_has_the_command_that_installs_the_missing_library(
    folder: Path, tokenizer: FastTokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grammars, "find_spec", lambda name: None)
    with caplog.at_level("INFO", grammars.__name__):
        assert grammars.grammar_compiler(spec(folder, tokenizer=tokenizer), 9) is None
    [message] = caplog.messages
    assert message.startswith(f"no structured output for {folder} without llguidance: ") and "pip" in message


@pytest.mark.parametrize(
    ("kind", "text", "pattern"),
    [
        ("json", json.dumps(SCHEMA), None),
        ("regex", r"[a-c]{3}-\d+x", r"[a-c]{3}-\d+x"),
        ("choice", json.dumps(["yes", 'no, "never"', "größer"]), r"yes|no, \"never\"|größer"),
        ("grammar", 'root ::= "a" digit+ ";"\ndigit ::= [0-3]', r"a[0-3]+;"),
        ("grammar", 'start: "a" DIGIT+ ";"\nDIGIT: /[0-3]/', r"a[0-3]+;"),
    ],
)
def test_samples_fit_the_structure(
    kind: str, text: str, pattern: str | None, engine: GenerationEngine, tokenizer: Any
) -> None:
    assert Feature.JSON in engine.features
    structured = [
        EngineRequest(
            number, [5, 6], SamplingParams(max_tokens=200, seed=number, structured_outputs=Structure(kind, text))
        )
        for number in range(4)
    ]
    free = EngineRequest(9, [5, 6], SamplingParams(max_tokens=10, temperature=0))
    done = finished_by_id(engine, *structured, free)
    for sequence in structured:
        made = tokens(done[sequence.id])
        last = done[sequence.id][-1]
        assert last.error is None
        written = tokenizer.decode(made, skip_special_tokens=True)
        if last.finish == "length":
            continue
        assert made[-1] == 2
        if pattern is None:
            found = json.loads(written)
            assert set(found) == {"name", "size"}
            assert isinstance(found["size"], int)
        else:
            assert re.fullmatch(pattern, written)
    assert any(done[sequence.id][-1].finish == "stop" for sequence in structured)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json", "{"),
        ("json", '{"type": "nothing"}'),
        ("regex", "(a"),
        ("grammar", "root ::= missing"),
        ("grammar", "%%"),
    ],
)
def test_what_does_not_compile_is_refused(kind: str, text: str, engine: GenerationEngine) -> None:
    with pytest.raises(ConchError, match=f"^structured_outputs: this {kind} does not compile: ") as refused:
        engine.add(EngineRequest(0, [5], SamplingParams(structured_outputs=Structure(kind, text))))
    assert refused.value.code is Code.INVALID_ARG
    assert "\n" not in refused.value.message
    assert not engine.busy


def test_a_structure_may_end_before_the_least_length(engine: GenerationEngine) -> None:
    asked = SamplingParams(max_tokens=9, min_tokens=6, temperature=0, structured_outputs=Structure("regex", "ab"))
    done = finished_by_id(engine, EngineRequest(0, [5], asked))[0]
    assert done[-1].finish == "stop"
    assert len(tokens(done)) == 3


def test_beams_cannot_be_structured(engine: GenerationEngine) -> None:
    with pytest.raises(ConchError, match=r"^beam search with structured output is not supported"):
        engine.add(EngineRequest(0, [5], SamplingParams(beam_width=2, structured_outputs=Structure("regex", "a+"))))


def test_output_fits_where_the_tokenizer_decodes_by_a_chain(folder: Path) -> None:
    """Read by its vocabulary, the tokenizer would have ``Ġ`` for a space and two characters for the ``ö``."""
    tokenizer = tokenizer_with(folder, decoders.ByteFallback(), decoders.ByteLevel())
    text = "größer a b\n, ü"
    asked = SamplingParams(max_tokens=40, structured_outputs=Structure("choice", json.dumps([text])))
    done = finished(opened(folder, tokenizer=tokenizer), EngineRequest(0, [5], asked))

    assert tokenizer.decode(tokens(done)) == text
    assert done[-1].finish == "stop"


def test_tokens_without_a_text_of_their_own_mean_no_structures(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tokenizer_with(folder, decoders.ByteLevel(), decoders.Replace("ö", "oe"))

    assert Feature.JSON not in opened(folder, tokenizer=tokenizer).features
    assert f"no structured output for {folder}: its tokens add " in caplog.text


def test_without_a_tokenizer_structures_are_no_feature(tmp_path: Path) -> None:
    assert Feature.JSON not in opened(write(tmp_path, "llama")).features


def test_a_structure_that_comes_to_a_dead_end_says_so(engine: GenerationEngine) -> None:
    """No token is left, which is not the end of the text."""
    every = tuple((token,) for token in range(3, engine.vocabulary))
    structure = Structure("choice", '["yes"]')
    asked = SamplingParams(temperature=0, structured_outputs=structure, bad_words_token_ids=every)
    engine.add(EngineRequest(900, [5], asked))
    (progress,) = engine.step()
    assert progress.error is not None
    assert progress.error.message.startswith("the structured output cannot be continued: ")
    assert progress.error.code is Code.INVALID_ARG
    assert not engine.busy


def optional_parts(count: int, head: str) -> Structure:
    """A grammar with so many optional parts after a beginning."""
    parts = [f"p{index}" for index in range(count)]
    rules = "\n".join(f'{part}: "a" "b"' for part in parts)
    return Structure("grammar", f"start: /{head}/ {'? '.join(parts)}?\n{rules}")


TOO_COMPLEX = "its structure is too complex: too many of its parts can follow at one position"


@pytest.mark.parametrize(
    ("structure", "reason"),
    [
        (optional_parts(5500, "[xy]"), TOO_COMPLEX),
        (Structure("json", '{"enum": []}'), "Unsatisfiable schema: anyOf is empty"),
        (Structure("json", json.dumps({"allOf": [{"anyOf": [{"const": 1}] * 3}] * 20})), "schema too large"),
        (Structure("json", '{"anyOf": [{"$ref": "#"}]}'), "no text fits its structure"),
    ],
    ids=["optional", "empty", "product", "circle"],
)  # fmt: skip
def test_structures_that_explode_are_refused_at_once(
    structure: Structure, reason: str, engine: GenerationEngine
) -> None:
    with pytest.raises(ConchError) as refused:
        engine.compile(structure)
    assert refused.value.code is Code.INVALID_ARG
    assert refused.value.message == f"structured_outputs: this {structure.kind} does not compile: {reason}"


def test_structure_that_becomes_too_complex_ends_its_request_alone(engine: GenerationEngine) -> None:
    late = SamplingParams(max_tokens=60, seed=1, structured_outputs=optional_parts(5500, "[xy]{30}"))
    free = SamplingParams(max_tokens=60, min_tokens=60)
    done = finished_by_id(engine, EngineRequest(0, [5], late), EngineRequest(1, [5], free))
    error = done[0][-1].error
    assert error is not None and error.code is Code.INVALID_ARG
    assert error.message == f"the structured output cannot be continued: {TOO_COMPLEX}"
    assert 20 < len(tokens(done[0])) < 60
    assert len(tokens(done[1])) == 60


@pytest.mark.parametrize("streams", [0, 16])
@pytest.mark.parametrize(
    "seeds", [range(2000, 2012), pytest.param(range(3000, 3300), marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_completions_of_generated_schemas_are_valid(
    seeds: range, streams: int, engine: GenerationEngine, tokenizer: Any
) -> None:
    """Alone, one after the other, and together beside streams."""
    closing = {tokenizer.encode(text)[0]: 6.0 for text in '"}]'}
    documents = {seed: Maker(seed).document() for seed in seeds}
    requests = []
    for seed, schema in documents.items():
        try:
            structure = structure_of("json", schema, "response_format")
            compiled = engine.compile(structure)
        except ConchError:
            continue
        sampling = SamplingParams(max_tokens=120, seed=seed, structured_outputs=structure, logit_bias=closing)
        requests.append(EngineRequest(seed, [5, 6], sampling, 0, compiled))
    running = [
        EngineRequest(index, [5, index], SamplingParams(max_tokens=120, min_tokens=120)) for index in range(streams)
    ]
    done = {}
    for group in [[*running, *requests]] if streams else [[request] for request in requests]:
        done.update(finished_by_id(engine, *group))
    assert all(len(tokens(done[request.id])) == 120 for request in running)
    stopped = 0
    for request in requests:
        last = done[request.id][-1]
        assert last.error is None
        if last.finish == "stop":
            stopped += 1
            text = tokenizer.decode(tokens(done[request.id]), skip_special_tokens=True)
            assert not schemas.fault(schemas.judge(documents[request.id]), text.encode())
    assert stopped > 0.3 * len(seeds)


def test_one_compiled_structure_serves_several_sequences(engine: GenerationEngine, tokenizer: Any) -> None:
    wanted = Structure("regex", "abc|xyz")
    compiled = engine.compile(wanted)
    requests = [
        EngineRequest(number, [5 + number], SamplingParams(max_tokens=9, structured_outputs=wanted), 0, compiled)
        for number in range(3)
    ]
    finished = finished_by_id(engine, *requests)
    assert len(finished) == len(requests)
    for progress in finished.values():
        assert tokenizer.decode(tokens(progress), skip_special_tokens=True) in ("abc", "xyz")


@pytest.mark.parametrize("begun", [True, False])
def test_structure_applies_after_the_reasoning(engine: GenerationEngine, tokenizer: Any, begun: bool) -> None:
    """Two letters stand for the marks; the ends of a text are the likeliest tokens in the reasoning."""
    [first], [last] = (tokenizer.encode(letter, special_tokens=False) for letter in "({")
    [free] = tokenizer.encode("m", special_tokens=False)
    wanted = Structure("regex", "abc|xyz")
    compiled = engine.compile(wanted)
    biases = dict.fromkeys(tokenizer.special.eos_ids, 100.0) | {first: 90.0 if not begun else 0.0}

    def generated(reasoning: ReasoningTokens | None, max_tokens: int, **more: float) -> list[int]:
        bias = {**biases, **{int(id): value for id, value in more.items()}}
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=0, structured_outputs=wanted, logit_bias=bias, reasoning=reasoning
        )
        return tokens(finished_by_id(engine, EngineRequest(1, [5, 6], sampling, 0, compiled))[1])

    reasoning = ReasoningTokens(first, last, begun)
    # Reasoning that does not end has no structure.
    opened = [] if begun else [first]
    assert generated(reasoning, 6, **{str(free): 95.0}) == [*opened, *[free] * (6 - len(opened))]
    # It ends at its mark, and an answer without it may be chosen at the beginning.
    found = generated(reasoning, 9, **{str(last): 95.0})
    assert found[: len(opened) + 1] == [*opened, last]
    assert tokenizer.decode(found[len(opened) + 1 :], skip_special_tokens=True) in ("abc", "xyz")
    found = generated(ReasoningTokens(first, last, False), 9, **{str(first): -100.0})
    assert tokenizer.decode(found, skip_special_tokens=True) in ("abc", "xyz")


@pytest.mark.parametrize("vocabulary", [256, 264, 288], ids=["fewer than tokens", "more", "whole words"])
def test_masks_of_networks_of_any_size(tokenizer: FastTokenizer, vocabulary: int) -> None:
    compiler = grammars.GrammarCompiler(tokenizer, token_bytes(tokenizer), vocabulary, (2,))
    matchers = [grammars.Matcher(compiler.compile(Structure("regex", text))) for text in ("[ab]+", "[cd]+", "x|y")]
    for bits, allowed in zip(grammars.masks(matchers, vocabulary), ("ab", "cd", "xy"), strict=True):
        ids = [id for id in range(vocabulary) if bits[id // 8] >> id % 8 & 1]
        assert sorted(tokenizer.decode([id]) for id in ids) == list(allowed)
