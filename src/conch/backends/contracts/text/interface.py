"""Text in, text out: the tensors of a language model, and what a request's tensors mean.

Sources: Triton's vLLM backend for ``sampling_parameters`` and what is returned on request, the in-flight batcher's
ensemble for the single-value inputs.  Used by the thread that reads the server's frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from conch.backends.contracts.text.responses import TextOutputOptions, TextResponseBuilder
from conch.backends.contracts.text.stops import StopStrings
from conch.backends.generation.defaults import Defaults
from conch.backends.generation.job import ResponseBuilder
from conch.backends.generation.limits import Limits
from conch.backends.generation.parameters import RequestedSampling, read_document
from conch.backends.generation.sampling import Sampling
from conch.backends.generation.structures import parsed
from conch.backends.native.arrays import Request
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer
from conch.errors import invalid
from conch.inference import TensorSpec

#: Single-value inputs that are parameters of generation: their datatypes.
_VALUES: Final[Mapping[str, str]] = {
    "max_tokens": "INT32",
    "temperature": "FP32",
    "top_k": "INT32",
    "top_p": "FP32",
    "min_length": "INT32",
    "repetition_penalty": "FP32",
    "presence_penalty": "FP32",
    "frequency_penalty": "FP32",
    "length_penalty": "FP32",
    "random_seed": "UINT64",
    "end_id": "INT32",
    "beam_width": "INT32",
}
_WORDS: Final = ("stop_words", "bad_words")
_WISHES: Final = (
    "return_finish_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_token_ids",
    "return_log_probs",
)
_TEXTS: Final = ("text_input", "messages", "tools", "chat_template_kwargs", "sampling_parameters")

INPUTS: Final = (
    *(TensorSpec(name, "BYTES", (1,), optional=True) for name in _TEXTS),
    *(TensorSpec(name, "BOOL", (1,), optional=True) for name in ("stream", "exclude_input_in_output")),
    *(TensorSpec(name, datatype, (1,), optional=True) for name, datatype in _VALUES.items()),
    TensorSpec("pad_id", "INT32", (1,), optional=True),
    *(TensorSpec(name, "BYTES", (-1,), optional=True) for name in _WORDS),
    *(TensorSpec(name, "BOOL", (1,), optional=True) for name in _WISHES),
)
OUTPUTS: Final = (
    TensorSpec("text_output", "BYTES", (-1,)),
    TensorSpec("finish_reason", "BYTES", (-1,)),
    TensorSpec("cumulative_logprob", "FP32", (-1,)),
    TensorSpec("logprobs", "BYTES", (-1,)),
    TensorSpec("num_input_tokens", "UINT32", (1,)),
    TensorSpec("num_output_tokens", "UINT32", (-1,)),
    TensorSpec("token_ids", "INT32", (-1,)),
)


@dataclass(frozen=True, slots=True)
class TextInterface:
    """Reads requests.  ``decoupled`` says whether responses may be streamed."""

    tokenizer: TextTokenizer
    defaults: Defaults
    limits: Limits
    decoupled: bool
    truncate: bool = False

    def reply(self, request: Request) -> ResponseBuilder:
        """What a request wants.  Raises INVALID_ARG or UNSUPPORTED with one sentence for what it cannot have."""
        asked = self._asked(request)
        stream = bool(request.option("stream", False))
        if stream and not self.decoupled:
            raise invalid("Streaming is only supported in decoupled mode.")
        text, prompt = self._prompt(request)
        chat = "messages" in request.inputs
        exclude = request.option("exclude_input_in_output", stream or chat)
        if stream and not exclude:
            raise invalid("When streaming, `exclude_input_in_output` = False is not allowed.")
        prompt, sampling = self._sampling(asked, prompt, chat)
        wishes = TextOutputOptions(
            stream=stream,
            prefix="" if exclude else text,
            stops=StopStrings(asked.stop) if asked.stop else None,
            include_stop=bool(asked.include_stop_str_in_output),
            skip_special_tokens=asked.skip_special_tokens is not False,
            finish_reason=_wished(request, "return_finish_reason"),
            cumulative_logprob=_wished(request, "return_cumulative_logprob", "return_log_probs"),
            logprobs=_wished(request, "return_logprobs", "return_log_probs"),
            num_input_tokens=_wished(request, "return_num_input_tokens"),
            num_output_tokens=_wished(request, "return_num_output_tokens"),
            token_ids=_wished(request, "return_token_ids"),
        )
        if sampling.logprobs is None and (wishes.logprobs or wishes.cumulative_logprob):
            sampling.logprobs = 0
            self.limits.check_features(sampling)
        return TextResponseBuilder(self._samples(prompt, sampling, asked), wishes, self.tokenizer)

    def _asked(self, request: Request) -> RequestedSampling:
        """All parameters of generation, wherever they come from."""
        asked = RequestedSampling()
        document = request.option("sampling_parameters")
        if document is not None:
            read_document(asked, document, "sampling_parameters")
        else:
            for name, value in request.parameters.items():
                asked.take(name, value, f"parameter '{name}'")
        for name in _VALUES:
            if name in request.inputs:
                asked.take(name, request.option(name), f"input '{name}'")
        for name in _WORDS:
            if name in request.inputs:
                asked.take(name, request.texts(name), f"input '{name}'")
        asked.check()
        return asked

    def _prompt(self, request: Request) -> tuple[str, list[int]]:
        text = request.option("text_input")
        messages = request.option("messages")
        if (text is None) == (messages is None):
            raise invalid(
                "either 'text_input' or 'messages' must be given" + (", not both" if text is not None else "")
            )
        if text is not None:
            prompt = self.tokenizer.encode(text)
            if not prompt:
                raise invalid("'text_input' is empty: there is nothing to continue")
            return text, prompt
        variables = _document(request, "chat_template_kwargs", dict) or {}
        taken = {"self", "messages", "tools"} & set(variables)
        if taken:
            raise invalid(f"input 'chat_template_kwargs' must not have '{taken.pop()}'")
        conversation = self.tokenizer.chat(
            _document(request, "messages", list), tools=_document(request, "tools", list), **variables
        )
        prompt = self.tokenizer.encode(conversation, special_tokens=False)
        if not prompt:
            raise invalid("the chat template makes an empty text of 'messages': there is nothing to continue")
        return conversation, prompt

    def _sampling(self, asked: RequestedSampling, prompt: list[int], chat: bool) -> tuple[list[int], Sampling]:
        """How the prompt is continued, and as much of its end as there is room for, if it may be cut."""
        if asked.truncate_prompt_tokens is not None:
            prompt = prompt[-asked.truncate_prompt_tokens :]
        if self.truncate:
            answer = asked.max_tokens or min(self.defaults.max_tokens, self.limits.room(0) // 2)
            prompt = prompt[-max(self.limits.room(answer), 1) :]
        sampling = self.defaults.sampling(asked, self.limits.room(len(prompt)), chat=chat)
        sampling.bad_words = self._bad_words(asked.bad_words or ())
        self.limits.check(prompt, sampling)
        return prompt, sampling

    def _bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """The forms in which each word may be written: as it is, and after a space."""
        forms = [
            tuple(self.tokenizer.encode(form, special_tokens=False)) for word in words for form in (word, f" {word}")
        ]
        return tuple(dict.fromkeys(form for form in forms if form))

    @staticmethod
    def _samples(prompt: list[int], sampling: Sampling, asked: RequestedSampling) -> list[tuple[list[int], Sampling]]:
        """One sequence for each sample; those of a beam search are one."""
        if sampling.beam_width > 1 or (asked.n or 1) == 1:
            return [(prompt, sampling)]
        return [(prompt, sampling.again(index)) for index in range(asked.n or 1)]


def _wished(request: Request, *names: str) -> bool:
    return any(request.option(name, False) for name in names)


def _document(request: Request, name: str, kind: type) -> Any:
    """What the JSON of an input says, None without it."""
    text = request.option(name)
    if text is None:
        return None
    document = parsed(f"input '{name}'", text)
    if not isinstance(document, kind):
        raise invalid(f"input '{name}' must be a JSON {'list' if kind is list else 'object'}")
    return document
