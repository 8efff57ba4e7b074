from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.checkpoints.tokenizers.fast import FastTokenizer
from conch.checkpoints.tokenizers.inputs import InputEncoder, open_encoder
from conch.checkpoints.tokenizers.pairs import shares
from conch.checkpoints.tokenizers.slow import SlowTokenizer
from conch.errors import Code, ConchError
from tests.text_checkpoints import TEXTS, write

LONG = " ".join(TEXTS) + " [SEP] and [MASK] the end"


@pytest.fixture(scope="module", params=["bert", "roberta"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp(request.param), "AutoModel", family=request.param)


def opened(folder: Path, **options: object) -> InputEncoder:
    given = Options.from_values({"task": "feature-extraction", **options})
    return open_encoder(Checkpoint.open(folder, given), given)


def in_python(folder: Path, fast: InputEncoder) -> InputEncoder:
    """The same with a tokenizer that is used as if it were written in Python."""
    tokenizer = fast.tokenizer
    slow = SlowTokenizer(AutoTokenizer.from_pretrained(folder), tokenizer.special, tokenizer.template, types=True)
    return InputEncoder(slow, fast.max_length)


def test_texts_and_pairs_equal_those_of_transformers(folder: Path) -> None:
    encoder, reference = opened(folder), AutoTokenizer.from_pretrained(folder)
    texts = [*TEXTS, "", " two  spaces ", "Ünïcode 北京 🙂", LONG]
    for pairs in (None, texts[::-1], [LONG] * len(texts)):
        items, cut = encoder.encode(texts, pairs)
        expected = reference(texts, pairs, truncation=True, return_token_type_ids=True)
        assert [item.ids.tolist() for item in items] == expected["input_ids"]
        types = [[0] * len(item.ids) if item.types is None else item.types.tolist() for item in items]
        assert types == expected["token_type_ids"]
        assert cut == sum(len(ids) > 64 for ids in reference(texts, pairs)["input_ids"])


def test_only_the_first_of_a_pair_is_shortened_when_asked(folder: Path) -> None:
    [item], cut = opened(folder).encode([LONG], [TEXTS[0]], truncation="first")
    expected = AutoTokenizer.from_pretrained(folder)(LONG, TEXTS[0], truncation="only_first")
    assert item.ids.tolist() == expected["input_ids"] and cut == 1
    with pytest.raises(ConchError, match=r"input 'text_pair' has \d+ tokens in row 0; the model takes at most 64"):
        opened(folder).encode([TEXTS[0]], [LONG], truncation="first")


def test_shortened_texts_keep_their_offsets(folder: Path) -> None:
    [item], _ = opened(folder).encode([LONG], offsets=True)
    expected = AutoTokenizer.from_pretrained(folder)(LONG, truncation=True, return_offsets_mapping=True)
    assert item.offsets == expected["offset_mapping"]


def test_long_texts_are_refused_where_the_configuration_says_so(folder: Path) -> None:
    encoder = opened(folder, truncation="refuse", max_length=16)
    with pytest.raises(
        ConchError, match=r"^input 'text_input' has \d\d+ tokens in row 1; the model takes at most 16$"
    ) as error:
        encoder.encode([TEXTS[3], LONG])
    assert error.value.code is Code.INVALID_ARG


def test_texts_without_tokens_are_refused_where_nothing_is_added(folder: Path) -> None:
    encoder = opened(folder)
    assert isinstance(encoder.tokenizer, FastTokenizer)
    encoder.tokenizer.fast.post_processor = None
    with pytest.raises(ConchError, match="input 'text_input' gives no token in row 1"):
        encoder.encode(["a", ""])


def test_threads_share_a_tokenizer(folder: Path) -> None:
    encoder = opened(folder)
    texts = [LONG, *TEXTS]
    expected = [item.ids.tolist() for item in encoder.encode(texts)[0]]
    with ThreadPoolExecutor(4) as pool:
        for items, cut in pool.map(lambda _: encoder.encode(texts), range(50)):
            assert [item.ids.tolist() for item in items] == expected and cut == 1


def test_many_texts_are_tokenised_in_parts(folder: Path) -> None:
    items, cut = opened(folder).encode([TEXTS[3]] * 2500 + [LONG])
    assert len(items) == 2501 and cut == 1 and items[2499].ids.tolist() == items[0].ids.tolist()


def test_pairs_share_the_room_as_the_library_does(folder: Path) -> None:
    encoder = opened(folder)
    assert encoder.tokenizer.fast is not None
    reference = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    for first in (1, 3, 9, 24, 60):
        for second in (1, 4, 9, 25, 70):
            texts = [" ".join(["the"] * first), " ".join(["the"] * second)]
            one, two = (len(encoder.tokenizer.fast.encode(text, add_special_tokens=False).ids) for text in texts)
            for room in (4, 7, 20, 61):
                reference.enable_truncation(room + reference.num_special_tokens_to_add(True))
                kept = reference.encode(*texts)
                sequences = [
                    id for id, special in zip(kept.sequence_ids, kept.special_tokens_mask, strict=True) if not special
                ]
                assert shares(one, two, room) == (sequences.count(0), sequences.count(1))


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


def test_a_tokenizer_in_python_gives_the_same_ids(tmp_path: Path) -> None:
    folder = write(tmp_path, "AutoModel")
    given = Options.from_values({"task": "feature-extraction"})
    checkpoint = Checkpoint.open(folder, given)
    fast = open_encoder(checkpoint, given)
    slow = in_python(folder, fast)
    for texts, pairs in (([*TEXTS, LONG], None), ([*TEXTS, LONG], [LONG, *TEXTS])):
        (ones, cut), (twos, also_cut) = fast.encode(texts, pairs), slow.encode(texts, pairs)
        assert [one.ids.tolist() for one in ones] == [two.ids.tolist() for two in twos] and cut == also_cut
    ids = ones[0].ids.tolist()
    ours, others = slow.tokenizer, fast.tokenizer
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == others.decode(ids, skip_special_tokens=skip)
    assert ours.join([ours.token(id) for id in ids]) == others.join([others.token(id) for id in ids])


def test_what_the_tokenizer_cannot_read_is_the_fault_of_the_text(tmp_path: Path) -> None:
    folder = write(tmp_path, "AutoModel")
    words = Tokenizer(models.WordLevel({"station": 0}, unk_token="unknown"))
    words.save(str(folder / "tokenizer.json"))
    with pytest.raises(ConchError, match="input 'text_input' cannot be tokenised: WordLevel error") as error:
        opened(folder).encode(["station", "market"])
    assert error.value.code is Code.INVALID_ARG


@pytest.mark.parametrize("side", ["right", "left"])
def test_what_is_cut_off_a_text_is_kept_in_few_pieces(folder: Path, side: str) -> None:
    encoder = opened(folder)
    assert isinstance(encoder.tokenizer, FastTokenizer)
    encoder.tokenizer.side = side
    long = "station bus " * 400
    [item], _ = encoder.encode([long], [long])
    # Many pieces of each would become their product when the two are combined.
    [(kept, length)] = encoder.tokenizer._parts([long], "text_input", 60).values()
    assert len(kept) == 60 and len(kept.overflowing) < 5
    words = encoder.tokenizer.fast.encode(long, add_special_tokens=False).ids
    assert length == len(words) and kept.ids == (words[:60] if side == "right" else words[-60:])
    expected = AutoTokenizer.from_pretrained(folder, truncation_side=side)(long, long, truncation=True)
    assert item.ids.tolist() == expected["input_ids"]


def test_a_text_of_many_pairs_is_tokenised_once(folder: Path) -> None:
    encoder, reference = opened(folder), AutoTokenizer.from_pretrained(folder)
    assert isinstance(encoder.tokenizer, FastTokenizer)
    counted = Counted(encoder.tokenizer.fast)
    encoder.tokenizer.fast = counted  # type: ignore[assignment]
    labels = ["bus", "an open market", "library", "bus"]
    for truncation in ("first", "longest"):
        counted.texts.clear()
        items, cut = encoder.encode([LONG] * 4, labels, truncation=truncation, per_row=4)  # type: ignore[arg-type]
        assert sorted(counted.texts) == sorted({LONG, *labels}) and cut == 1
        expected = reference([LONG] * 4, labels, truncation="only_first" if truncation == "first" else True)
        assert [item.ids.tolist() for item in items] == expected["input_ids"]


class Counted:
    """A tokenizer that remembers what it was given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.texts: list[str] = []

    def encode_batch_fast(self, texts: list[str], **settings: bool) -> object:
        self.texts += texts
        return self.tokenizer.encode_batch_fast(texts, **settings)

    def __getattr__(self, name: str) -> object:
        return getattr(self.tokenizer, name)


def test_pairs_without_special_tokens_have_types(tmp_path: Path) -> None:
    encoder = opened(write(tmp_path, "AutoModel"))
    assert isinstance(encoder.tokenizer, FastTokenizer)
    encoder.tokenizer.fast.post_processor = None
    for text in (TEXTS[0], LONG):
        [item], _ = encoder.encode([text], ["bus"])
        expected = encoder.tokenizer.fast.encode("bus", add_special_tokens=False)
        assert item.types is not None and item.types.sum() == len(expected)
        assert item.ids[item.types == 1].tolist() == expected.ids


@pytest.mark.parametrize("most", [1, 2])
def test_a_maximum_that_leaves_no_room_for_text_is_refused(folder: Path, most: int) -> None:
    message = f"max_length is {most}, and the tokenizer puts 2 special tokens around a text: set parameter 'max_length'"
    with pytest.raises(ConchError, match=message) as error:
        opened(folder, max_length=most)
    assert error.value.code is Code.INVALID_ARG
    assert opened(folder, max_length=3).room() == 1
    with pytest.raises(ConchError, match=message):
        InputEncoder(in_python(folder, opened(folder)).tokenizer, most)
