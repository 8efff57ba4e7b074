"""Tokenizers of checkpoints' folders: the same ids and texts as transformers, without transformers."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from conch.checkpoints.tokenizers.open import SlowTokenizer, open_tokenizer
from conch.checkpoints.tokenizers.stream import WindowStream
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer
from conch.core.errors import ConchError
from tests.refusals import refused_argument
from tests.text_checkpoints import TEXTS, write
from tests.unit.checkpoints.folders import bare
from tests.unit.checkpoints.tokenizers.encoders import opened
from tests.unit.checkpoints.tokenizers.tokenizers_made import byte_level, metaspace, unigram

GPT: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|endoftext|>",
    "eos_token": "<|im_end|>",
}
LLAMA: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
}


def checkpoint(folder: Path, made: Tokenizer, settings: dict[str, Any], **files: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    documents = {"tokenizer_config": settings, "config": {"model_type": "gpt2"}, **files}
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    return folder


def texts() -> list[str]:
    draw = random.Random(3)
    drawn = ["".join(draw.choice("abc hé日🙂 \n\t01.,'<|>▁") for _ in range(draw.randrange(1, 30))) for _ in range(300)]
    special = ["<|im_start|>user\nhello<|im_end|>", "<s>a</s> b<unk>", "<extra> a <extra>", "<日 think>", ""]
    return [*drawn, *special, "hello world", "  a ab  "]


@pytest.mark.parametrize(
    ("made", "settings"),
    [
        (byte_level, GPT),
        (byte_level, {**GPT, "add_bos_token": True}),
        (byte_level, {**GPT, "add_bos_token": True, "add_eos_token": True}),
        (byte_level, {**GPT, "pad_token": "<pad>", "additional_special_tokens": ["<extra>"]}),
        (
            byte_level,
            {
                **GPT,
                "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
                "clean_up_tokenization_spaces": True,
            },
        ),
        (
            byte_level,
            {**GPT, "added_tokens_decoder": {"403": {"content": "<extra>", "special": False, "normalized": False}}},
        ),
        (metaspace, LLAMA),
        (metaspace, {**LLAMA, "add_bos_token": True}),
        (unigram, {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}),
    ],
)
def test_ids_and_texts_are_those_of_transformers(tmp_path: Path, made: Any, settings: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = made()
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=8, pad_token=tokenizer.id_to_token(0))
    folder = checkpoint(tmp_path, tokenizer, settings)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = open_tokenizer(bare(folder))

    assert ours.vocabulary == len(theirs)
    assert ours.special.all_ids >= set(theirs.all_special_ids)
    assert (ours.special.bos_id, ours.special.eos_ids) == (
        theirs.bos_token_id, (theirs.eos_token_id,) if theirs.eos_token_id is not None else (),
    )  # fmt: skip
    for text in texts():
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special, truncation=False, padding=False)["input_ids"]
            assert ours.encode(text, special_tokens=special) == ids, text
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, (2,)),
        ({"config": {"eos_token_id": 7}}, (7,)),
        ({"config": {"eos_token_id": None}}, (2,)),
        ({"config": {"text_config": {"eos_token_id": [4, 5]}}}, (4, 5)),
        ({"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": [9, 8]}}, (9, 8)),
        ({"config": {"eos_token_id": 7}, "generation_config": {"pad_token_id": 1}}, (7,)),
    ],
)
def test_ends_are_those_of_the_first_file_that_has_any(
    tmp_path: Path, files: dict[str, Any], ends: tuple[int, ...]
) -> None:
    assert open_tokenizer(bare(checkpoint(tmp_path, byte_level(), GPT, **files))).special.eos_ids == ends


def test_tokenizer_json_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    checkpoint(tmp_path, byte_level(), GPT)
    code = (
        "import sys; from pathlib import Path; from conch.checkpoints.folder import Checkpoint;"
        "from conch.checkpoints.options import Options; from conch.checkpoints.tokenizers.open import open_tokenizer;"
        f"made = open_tokenizer(Checkpoint(Path({str(tmp_path)!r}), '', '', {{}}, Options()));"
        "made.stream().add(made.encode('hello'));"
        "print(sorted({'torch', 'transformers', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class Spelled:
    """A tokenizer in Python as transformers has them, that spells."""

    is_fast = False
    model_input_names = ("input_ids",)
    truncation_side = "right"
    all_special_ids = (0,)
    eos_token, eos_token_id = "\0", 0
    bos_token = pad_token = unk_token = sep_token = cls_token = mask_token = None

    def __len__(self) -> int:
        return 0x110000

    def __call__(self, text: str, **settings: Any) -> dict[str, list[int]]:
        return {"input_ids": [*map(ord, text), *([0] if settings["add_special_tokens"] else [])]}

    def decode(self, ids: list[int], **settings: Any) -> str:
        return "".join(chr(id) for id in ids if id or not settings["skip_special_tokens"])

    def convert_tokens_to_ids(self, token: str) -> int:
        return ord(token)


def test_tokenizer_in_python_is_used_where_there_is_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *given, **options: Spelled())
    made: TextTokenizer = open_tokenizer(bare(tmp_path))
    stream = made.stream()

    assert isinstance(made, SlowTokenizer) and isinstance(stream, WindowStream)
    assert made.special.eos_ids == (0,) and made.encode("ab") == [97, 98, 0]
    assert stream.add([97, 0]) + stream.add([98]) + stream.flush() == "ab" == made.decode([97, 98, 0])
    assert made.piece(0) == "\0"


def test_half_a_surrogate_is_refused(tmp_path: Path) -> None:
    made = open_tokenizer(bare(checkpoint(tmp_path, byte_level(), GPT)))
    assert refused_argument(lambda: made.encode("a\ud800")).startswith("the text cannot be tokenised: ")


@pytest.mark.parametrize(
    ("name", "text"), [("tokenizer.json", "{}"), ("tokenizer_config.json", "[]"), ("config.json", "{")]
)
def test_broken_file_is_refused_by_name(tmp_path: Path, name: str, text: str) -> None:
    checkpoint(tmp_path, byte_level(), GPT)
    (tmp_path / name).write_text(text)
    assert str(tmp_path / name) in refused_argument(lambda: open_tokenizer(bare(tmp_path)))


def test_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert "has no tokenizer that transformers can load" in refused_argument(lambda: open_tokenizer(bare(tmp_path)))


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, "AutoModel")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ConchError, match=r"the tokenizer of .* cannot be read: .*tokenizer\.json"):
        opened(folder)


def test_a_vocabulary_alone_is_loaded_by_transformers(tmp_path: Path) -> None:
    folder = write(tmp_path, "AutoModel")
    expected = [item.ids.tolist() for item in opened(folder).encode(TEXTS)[0]]
    vocabulary = AutoTokenizer.from_pretrained(folder).get_vocab()
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.__getitem__)))
    assert [item.ids.tolist() for item in opened(folder).encode(TEXTS)[0]] == expected
