"""What a request asks of generation, read from JSON and from parameters: checked, typed, named in errors.

Pure.  Keys are those of vLLM's ``SamplingParams``, and OpenAI's names where clients mix them up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isclose, isfinite
from typing import Any, Final

from conch.backends.generation.sampling import Structure
from conch.backends.generation.structures import json_of, parsed, response_format, structured_outputs
from conch.errors import ConchError, invalid

#: More stop strings than a request can mean, and longer ones than a text can be searched for at every token.
MAX_STOPS: Final = 128
MAX_STOP_LENGTH: Final = 1024
MAX_BAD_WORDS: Final = 1024
MAX_BIASES: Final = 1024
#: Sequences of a request, and alternatives of a token.
MAX_SAMPLES: Final = 64
MAX_LOGPROBS: Final = 20

_INT32: Final = 2**31 - 1


def _wrong(name: str, value: Any, wanted: str) -> ConchError:
    return invalid(f"sampling parameter '{name}' is {json.dumps(value)[:80]}; it must be {wanted}")


def _integer(low: int, high: int = _INT32) -> Callable[[str, Any], int]:
    def read(name: str, value: Any) -> int:
        number: int | None = None
        if isinstance(value, int) and not isinstance(value, bool):
            number = value
        elif isinstance(value, float) and value.is_integer():
            number = int(value)
        elif isinstance(value, str):
            try:
                number = int(value)
            except ValueError:
                number = None
        if number is None or not low <= number <= high:
            upper = "" if high == _INT32 else f" and at most {high}"
            raise _wrong(name, value, f"a whole number of at least {low}{upper}")
        return number

    return read


def _number(low: float, high: float, wanted: str, *, above: bool = False) -> Callable[[str, Any], float]:
    def read(name: str, value: Any) -> float:
        try:
            number = float(value) if not isinstance(value, bool) else float("nan")
        except (OverflowError, TypeError, ValueError):
            number = float("nan")
        if not isfinite(number) or not low <= number <= high or (above and number == low):
            raise _wrong(name, value, wanted)
        return number

    return read


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if value in (0, 1):
        return bool(value)
    raise _wrong(name, value, "true or false")


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, "a text")
    return value


def _texts(name: str, value: Any) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
        raise _wrong(name, value, "a text or a list of texts")
    return tuple(one for one in listed if one)


def _stops(name: str, value: Any) -> tuple[str, ...]:
    texts = _texts(name, value)
    if len(texts) > MAX_STOPS:
        raise invalid(f"'{name}' has {len(texts)} stop strings; at most {MAX_STOPS} are allowed")
    for text in texts:
        if len(text) > MAX_STOP_LENGTH:
            raise invalid(
                f"'{name}' has a stop string of {len(text)} characters; at most {MAX_STOP_LENGTH} are allowed"
            )
    return texts


def _bad_words(name: str, value: Any) -> tuple[str, ...]:
    texts = _texts(name, value)
    if len(texts) > MAX_BAD_WORDS:
        raise invalid(f"'{name}' has {len(texts)} words; at most {MAX_BAD_WORDS} are allowed")
    return texts


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(
        isinstance(one, int) and not isinstance(one, bool) and 0 <= one <= _INT32 for one in value
    ):
        raise _wrong(name, value, "a list of token ids")
    if len(value) > MAX_STOPS:
        raise invalid(f"'{name}' has {len(value)} token ids; at most {MAX_STOPS} are allowed")
    return tuple(value)


def _bias(name: str, value: Any) -> dict[int, float]:
    document = json_of(name, value)
    if isinstance(document, dict) and len(document) > MAX_BIASES:
        raise invalid(f"'{name}' has {len(document)} token ids; at most {MAX_BIASES} are allowed")
    try:
        biases = {int(token): float(bias) for token, bias in document.items()}
    except (AttributeError, OverflowError, TypeError, ValueError):
        raise _wrong(name, value, "an object of biases by token id") from None
    if not all(isfinite(bias) and -100 <= bias <= 100 for bias in biases.values()):
        raise _wrong(name, value, "an object of biases, -100 to 100, by token id")
    return biases


@dataclass(slots=True)
class RequestedSampling:
    """What a request says; None where it says nothing."""

    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    end_id: int | None = None
    bad_words: tuple[str, ...] | None = None
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    beam_width: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    structure: Structure | None = None
    lora_name: str | None = None
    truncate_prompt_tokens: int | None = None
    #: Where each value came from, to name both when two disagree.
    _sources: dict[str, str] = field(default_factory=dict, repr=False)

    def take(self, name: str, value: Any, source: str = "") -> bool:
        """Note one value; False when ``name`` is not a parameter of generation.

        Raises INVALID_ARG for a value that is wrong, or another than was given under another name.
        """
        known = _READERS.get(name)
        if known is None:
            return False
        key, read = known
        if value is None:
            return True
        typed = read(name, value)
        source = source or name
        before = getattr(self, key)
        if before is None:
            setattr(self, key, typed)
            self._sources[key] = source
        elif not _same(before, typed):
            raise invalid(f"{source} is {_shown(typed)}, but {self._sources[key]} is {_shown(before)}")
        return True

    def check(self) -> None:
        """Raise INVALID_ARG for values that contradict each other."""
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise invalid(
                f"{self._sources['min_tokens']} is {self.min_tokens}, which is more than "
                f"{self._sources['max_tokens']}, {self.max_tokens}"
            )
        if self.use_beam_search and self.beam_width is None:
            self.beam_width = max(self.n or 1, 2)
        beams = self.beam_width or 1
        if beams > 1:
            if self.temperature:
                raise invalid(f"beam search does not sample: temperature must be 0 or absent, not {self.temperature}")
            if self.n is not None and self.n > beams:
                raise invalid(f"n is {self.n}, which is more than the beam width, {beams}")
        elif (self.n or 1) > 1 and self.temperature == 0:
            raise invalid(f"n is {self.n}, but with temperature 0 all samples are the same: n must be 1")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return isclose(one, other, rel_tol=1e-6)  # an FP32 tensor, and JSON
    return bool(one == other)


def _shown(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value, default=str)[:80]


_temperature = _number(0, 100, "a number of at least 0")
_penalty = _number(-2, 2, "a number from -2 to 2")
_samples = _integer(1, MAX_SAMPLES)
_count = _integer(1)

#: The field of ``RequestedSampling`` and the reader of each name.
_READERS: Final[Mapping[str, tuple[str, Callable[[str, Any], Any]]]] = {
    "n": ("n", _samples),
    "max_tokens": ("max_tokens", _count),
    "max_new_tokens": ("max_tokens", _count),
    "max_completion_tokens": ("max_tokens", _count),
    "min_tokens": ("min_tokens", _integer(0)),
    "min_length": ("min_tokens", _integer(0)),
    "temperature": ("temperature", _temperature),
    "top_k": ("top_k", lambda name, value: max(_integer(-1)(name, value), 0)),
    "top_p": ("top_p", _number(0, 1, "a number above 0 and at most 1", above=True)),
    "min_p": ("min_p", _number(0, 1, "a number from 0 to 1")),
    "repetition_penalty": ("repetition_penalty", _number(0, 100, "a number above 0", above=True)),
    "presence_penalty": ("presence_penalty", _penalty),
    "frequency_penalty": ("frequency_penalty", _penalty),
    "seed": ("seed", _integer(0, 2**64 - 1)),
    "random_seed": ("seed", _integer(0, 2**64 - 1)),
    "stop": ("stop", _stops),
    "stop_words": ("stop", _stops),
    "stop_token_ids": ("stop_token_ids", _ids),
    "include_stop_str_in_output": ("include_stop_str_in_output", _flag),
    "ignore_eos": ("ignore_eos", _flag),
    "end_id": ("end_id", _integer(0)),
    "bad_words": ("bad_words", _bad_words),
    "logit_bias": ("logit_bias", _bias),
    "logprobs": ("logprobs", _integer(0, MAX_LOGPROBS)),
    "skip_special_tokens": ("skip_special_tokens", _flag),
    "spaces_between_special_tokens": ("spaces_between_special_tokens", _flag),
    "beam_width": ("beam_width", _samples),
    "num_beams": ("beam_width", _samples),
    "best_of": ("n", _samples),
    "use_beam_search": ("use_beam_search", _flag),
    "length_penalty": ("length_penalty", _number(-10, 10, "a number from -10 to 10")),
    "early_stopping": ("early_stopping", _flag),
    "structured_outputs": ("structure", structured_outputs),
    "guided_decoding": ("structure", structured_outputs),
    "response_format": ("structure", response_format),
    "lora_name": ("lora_name", _text),
    "truncate_prompt_tokens": ("truncate_prompt_tokens", _count),
}

#: All names that are understood.
NAMES: Final = frozenset(_READERS)

#: Names of vLLM's that mean what nothing here does; refused rather than ignored.
REFUSED: Final = ("prompt_logprobs", "logits_processors", "allowed_token_ids", "extra_args")


def read_document(asked: RequestedSampling, text: str, source: str) -> dict[str, Any]:
    """Take all values of a JSON object.  Raises INVALID_ARG, naming what is wrong."""
    document = parsed(f"input '{source}'", text)
    if not isinstance(document, dict):
        raise invalid(f"input '{source}' must be a JSON object, not {text[:80]}")
    for name, value in document.items():
        if asked.take(name, value, f"{name} in '{source}'"):
            continue
        if name in REFUSED:
            if value:
                raise invalid(f"sampling parameter '{name}' is not supported")
        elif name not in _PASSED_OVER:
            raise invalid(f"sampling parameter '{name}' is not known")
    return document


#: Names that some clients send and that decide nothing here.
_PASSED_OVER: Final = frozenset({"detokenize", "output_kind", "stream", "priority", "return_token_ids"})
