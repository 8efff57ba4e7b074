"""Declarations of the sampling parameters.

Each field of :class:`SamplingParams` declares a parameter: its name (as in vLLM's ``SamplingParams`` if it exists
there), type, neutral default, names in other protocols, and the required engine feature. The request readers, the
tensors of the text and TensorRT-LLM I/O formats, the members of OpenAI's API and the checks of engine features are
derived from these declarations; a test compares the table in docs/generation.md with them. To add a parameter, add a
field here and implement it in each engine.

Pure functions; imported by the server's front ends and by workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Final, Literal

from conch.core.errors import invalid
from conch.core.sampling.structures import KINDS, TOOL_CALL, Structure, response_format, structured_outputs
from conch.core.sampling.values import Biases, Document, Flag, Integer, Number, Text, TextList, TokenIds, ValueType

#: The maximum number of sequences per request, and of alternatives per token.
MAX_SAMPLES: Final = 64
MAX_LOGPROBS: Final = 20
#: The maximum number and length (characters) of stop strings; the text is searched for them after every token.
MAX_STOPS: Final = 128
MAX_STOP_LENGTH: Final = 1024
MAX_BAD_WORDS: Final = 1024
#: The maximum length of ``cache_salt`` (characters).
MAX_SALT_LENGTH: Final = 1024
#: The maximum length of the name of a LoRA adapter (characters).
MAX_ADAPTER_NAME: Final = 255
#: The input of text models for the temperature that applies if neither the request nor the model sets one.
DEFAULT_TEMPERATURE: Final = "default_temperature"
#: The input of text models that drops the oldest messages of a conversation until its prompt fits the context.
DROP_OLDEST: Final = "drop_oldest_messages"
#: The input of text models for the text after the completion.
SUFFIX: Final = "suffix"


def check_adapter_name(name: str, param: str = "lora_name") -> None:
    """Raise INVALID_ARG for a name that no LoRA adapter may have; ``param`` names the parameter with it."""
    if not name.strip() or len(name) > MAX_ADAPTER_NAME or not name.isprintable():
        raise invalid(
            f"the name of a LoRA adapter must have 1 to {MAX_ADAPTER_NAME} printable characters: {name[:50]!r} has "
            f"{len(name)} characters",
            param,
        )


class Feature(StrEnum):
    """An optional feature of engines; the value is its name in errors."""

    BEAMS = "beam search"
    LOGPROBS = "log-probabilities"
    TOP_LOGPROBS = "log-probabilities of other tokens than the chosen one"
    PROMPT_LOGPROBS = "log-probabilities of the prompt"
    MIN_P = "min_p"
    SEED = "a random seed"
    REPETITION = "a repetition penalty"
    PENALTIES = "presence and frequency penalties"
    MIN_TOKENS = "a minimum number of tokens"
    BAD_WORDS = "bad words"
    LOGIT_BIAS = "logit_bias"
    JSON = "structured output by JSON schema"
    REGEX = "structured output by regular expression"
    GRAMMAR = "structured output by grammar"
    CHOICE = "structured output by choice"
    LORA = "LoRA adapters"


#: The features of the kinds of structured output.
STRUCTURED_OUTPUTS: Final = frozenset(Feature[kind.upper()] for kind in KINDS)


@dataclass(frozen=True, slots=True)
class SamplingParameter:
    """The declaration of a sampling parameter.

    ``neutral`` is the value without effect (None: there is none). ``aliases`` are further names in
    ``sampling_parameters``; ``forms`` are further names with values of another type. ``text_input`` is the name of its
    input in the text I/O format, and ``inflight_inputs`` are the names of its inputs in the in-flight batcher's
    ``tensorrt_llm``; both have the datatype of ``type``. ``openai`` specifies whether it is a member of OpenAI's API,
    conch's extension of that API, or absent. A value other than ``neutral`` requires ``feature``, or the features that
    ``feature``, a function, returns for the value.
    """

    type: ValueType
    description: str
    neutral: Any
    name: str = ""
    aliases: tuple[str, ...] = ()
    forms: Mapping[str, ValueType] = field(default_factory=dict)
    text_input: str = ""
    inflight_inputs: tuple[str, ...] = ()
    openai: Literal["member", "extension", "absent"] = "extension"
    feature: Feature | Callable[[Any], set[Feature]] | None = None

    def features(self, value: Any) -> set[Feature]:
        """Return the engine features that ``value`` requires."""
        if self.feature is None or value == self.neutral:
            return set()
        return {self.feature} if isinstance(self.feature, Feature) else self.feature(value)


def _parameter(type: ValueType, default: Any, description: str, **more: Any) -> Any:
    """Declare a field of ``SamplingParams``; ``neutral`` defaults to the field's default."""
    values = {"default_factory": default, "default": MISSING} if callable(default) else {"default": default}
    neutral = more.pop("neutral", default() if callable(default) else default)
    return field(**values, metadata={"parameter": SamplingParameter(type, description, neutral, **more)})


_PENALTY: Final = Number(-2, 2, "a number from -2 to 2")
_SAMPLES: Final = Integer(1, MAX_SAMPLES)
_STRUCTURED_OUTPUTS: Final = Document(f"an object with one of {', '.join(KINDS)}", structured_outputs)
_RESPONSE_FORMAT: Final = Document("OpenAI's object", response_format)


@dataclass(frozen=True, slots=True)
class ReasoningTokens:
    """The tokens around reasoning that comes before a structure; ``begun``: the prompt ends with the first of them."""

    open: int
    close: int
    begun: bool


@dataclass(slots=True)
class SamplingParams:
    """The parameters that determine how the tokens of a sequence are chosen and when it ends.

    Engines ignore the fields about text, such as ``stop`` and ``bad_words`` (which they get as token ids). In the
    parameters that an engine gets, ``n`` is 1 except for beam search.
    """

    n: int = _parameter(
        _SAMPLES, 1, "number of completions; with beam search, the number of beams returned",
        aliases=("best_of",), inflight_inputs=("num_return_sequences",), openai="member",
    )  # fmt: skip
    max_tokens: int = _parameter(
        Integer(1), 16, "maximum number of tokens in a completion", neutral=None,
        aliases=("max_new_tokens", "max_completion_tokens"),
        text_input="max_tokens", inflight_inputs=("request_output_len",), openai="member",
    )  # fmt: skip
    temperature: float = _parameter(
        Number(0, 100, "a number of at least 0"), 1.0, "divides the logits; 0 means greedy decoding",
        text_input="temperature", inflight_inputs=("temperature",), openai="member",
    )  # fmt: skip
    top_k: int = _parameter(
        Integer(-1, clamp=0), 0, "sample only from this many of the most likely tokens; 0 or -1: from all",
        text_input="top_k", inflight_inputs=("runtime_top_k",),
    )  # fmt: skip
    top_p: float = _parameter(
        Number(0, 1, "a number above 0 and at most 1", above=True), 1.0,
        "sample only from the most likely tokens whose probabilities add up to this",
        text_input="top_p", inflight_inputs=("runtime_top_p",), openai="member",
    )  # fmt: skip
    min_p: float = _parameter(
        Number(0, 1, "a number from 0 to 1"), 0.0,
        "sample only from tokens with at least this fraction of the highest probability", feature=Feature.MIN_P,
    )  # fmt: skip
    min_tokens: int = _parameter(
        Integer(0), 0, "minimum number of tokens in a completion",
        aliases=("min_length",), text_input="min_length", inflight_inputs=("min_length",), feature=Feature.MIN_TOKENS,
    )  # fmt: skip
    repetition_penalty: float = _parameter(
        Number(0, 100, "a number above 0", above=True), 1.0,
        "above 1: makes tokens of the prompt and the completion less likely",
        text_input="repetition_penalty", inflight_inputs=("repetition_penalty",), feature=Feature.REPETITION,
    )  # fmt: skip
    presence_penalty: float = _parameter(
        _PENALTY, 0.0, "subtracted from the logits of tokens that already occur in the completion",
        text_input="presence_penalty", inflight_inputs=("presence_penalty",), openai="member",
        feature=Feature.PENALTIES,
    )  # fmt: skip
    frequency_penalty: float = _parameter(
        _PENALTY, 0.0, "subtracted from the logit of a token for each of its occurrences in the completion",
        text_input="frequency_penalty", inflight_inputs=("frequency_penalty",), openai="member",
        feature=Feature.PENALTIES,
    )  # fmt: skip
    length_penalty: float = _parameter(
        Number(-10, 10, "a number from -10 to 10"), 1.0,
        "exponent of the length by which the score of a beam is divided",
        text_input="length_penalty", inflight_inputs=("len_penalty",),
    )  # fmt: skip
    seed: int | None = _parameter(
        Integer(0, 2**64 - 1), None, "random seed; the same seed gives the same tokens", aliases=("random_seed",),
        text_input="random_seed", inflight_inputs=("random_seed", "seed"), openai="member", feature=Feature.SEED,
    )  # fmt: skip
    end_id: int | None = _parameter(
        Integer(0), None, "the end-of-sequence token, instead of the checkpoint's",
        text_input="end_id", inflight_inputs=("end_id",), openai="absent",
    )  # fmt: skip
    ignore_eos: bool = _parameter(Flag(), False, "continue after an end-of-sequence token")
    stop: tuple[str, ...] = _parameter(
        TextList("stop string", MAX_STOPS, MAX_STOP_LENGTH), (), "strings that end the completion",
        aliases=("stop_words",), text_input="stop_words", openai="member",
    )  # fmt: skip
    stop_token_ids: tuple[int, ...] = _parameter(TokenIds(), (), "additional tokens that end the completion")
    include_stop_str_in_output: bool = _parameter(Flag(), False, "include the stop string in the completion")
    beam_width: int = _parameter(
        _SAMPLES, 1, "above 1: beam search with this many beams", aliases=("num_beams",), text_input="beam_width",
        inflight_inputs=("beam_width",), feature=Feature.BEAMS,
    )  # fmt: skip
    use_beam_search: bool = _parameter(Flag(), False, "beam search with `n` beams, at least 2")
    early_stopping: bool = _parameter(
        Flag(), False, "beam search ends once `beam_width` beams are complete",
        inflight_inputs=("early_stopping",),
    )  # fmt: skip
    bad_words: tuple[str, ...] = _parameter(
        TextList("word", MAX_BAD_WORDS), (), "strings that must not occur in the completion", text_input="bad_words"
    )
    logit_bias: Mapping[int, float] = _parameter(
        Biases(), dict, "added to the logits of tokens", openai="member", feature=Feature.LOGIT_BIAS
    )
    logprobs: int | None = _parameter(
        Integer(0, MAX_LOGPROBS), None, "return the log-probabilities of the tokens and of this many "
                                        "alternatives to each",
        openai="member",
        feature=lambda count: {Feature.LOGPROBS, Feature.TOP_LOGPROBS} if count else {Feature.LOGPROBS},
    )  # fmt: skip
    prompt_logprobs: int | None = _parameter(
        Integer(0, MAX_LOGPROBS), None, "return the log-probabilities of the prompt's tokens after the first, and of "
                                        "this many alternatives to each",
        openai="absent", feature=Feature.PROMPT_LOGPROBS,
    )  # fmt: skip
    structured_outputs: Structure | None = _parameter(  # noqa: RUF009
        _STRUCTURED_OUTPUTS, None, "the structure of the completion", aliases=("guided_decoding",),
        forms={"response_format": _RESPONSE_FORMAT},
        feature=lambda structure: {Feature.JSON if structure.kind == TOOL_CALL else Feature[structure.kind.upper()]},
    )  # fmt: skip
    lora_name: str = _parameter(Text(), "", "the LoRA adapter to use", feature=Feature.LORA)
    cache_salt: str = _parameter(
        Text(MAX_SALT_LENGTH), "", "share cached prefixes only with requests that have the same salt"
    )
    skip_special_tokens: bool = _parameter(Flag(), True, "omit special tokens from the text")
    spaces_between_special_tokens: bool = _parameter(Flag(), True, "accepted; has no effect")
    truncate_prompt_tokens: int | None = _parameter(
        Integer(1), None, "keep only the last tokens of the prompt, this many"
    )
    #: ``bad_words`` as token ids, one sequence per spelling of a word; the code that has the tokenizer sets them.
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    #: The reasoning before ``structured_outputs``, which then applies after it; None if the structure comes first. The
    #: structure of tool calls applies outside of any reasoning.
    reasoning: ReasoningTokens | None = None

    @property
    def prefix_key(self) -> str:
        """The key of cached prefixes, which requests with the same adapter and salt share."""
        return f"{self.lora_name}\0{self.cache_salt}" if self.cache_salt else self.lora_name

    def make_greedy(self) -> None:
        """Select greedy decoding: set ``temperature`` to 0 and the other sampling values to neutral."""
        self.temperature, self.top_k, self.top_p, self.min_p, self.seed = 0.0, 0, 1.0, 0.0, None

    def end_ids(self, eos_ids: Iterable[int]) -> frozenset[int]:
        """Return the tokens that end a sequence; ``eos_ids`` are the end-of-sequence tokens of the checkpoint."""
        own = eos_ids if self.end_id is None else (self.end_id,)
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(own))

    def for_sample(self, index: int) -> SamplingParams:
        """Return the parameters of sample ``index`` of ``n``, a separate sequence with its own seed.

        Only the first one reports the log-probabilities of the prompt.
        """
        return replace(
            self,
            n=1,
            seed=None if self.seed is None else (self.seed + index) % 2**64,
            prompt_logprobs=None if index else self.prompt_logprobs,
        )

    def features(self) -> dict[Feature, str]:
        """Return the engine features that these parameters require, each with a parameter that requires it.

        They have the order of ``Feature``.
        """
        needed = {Feature.BAD_WORDS: "bad_words"} if self.bad_words_token_ids else {}
        for parameter in PARAMETERS:
            for feature in parameter.features(getattr(self, parameter.name)):
                needed.setdefault(feature, parameter.name)
        return {feature: needed[feature] for feature in Feature if feature in needed}


#: All parameters in the order of the fields.
PARAMETERS: Final = tuple(
    replace(declared.metadata["parameter"], name=declared.name)
    for declared in fields(SamplingParams)
    if "parameter" in declared.metadata
)
#: The parameter and value type of each name in ``sampling_parameters``.
NAMES: Final[Mapping[str, tuple[SamplingParameter, ValueType]]] = {
    name: (parameter, type)
    for parameter in PARAMETERS
    for name, type in {
        **dict.fromkeys((parameter.name, *parameter.aliases), parameter.type), **parameter.forms
    }.items()
}  # fmt: skip
#: Unsupported parameters of vLLM; rejected if they have a value.
REFUSED: Final = ("logits_processors", "allowed_token_ids", "extra_args")
#: Names that some clients send; accepted without effect.
IGNORED: Final = frozenset({"detokenize", "output_kind", "stream", "priority", "return_token_ids"})
