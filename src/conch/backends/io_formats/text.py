"""The I/O format ``text``: text in, text out. Its tensors, their meaning in a request, and its backend.

Sources: Triton's vLLM backend for ``sampling_parameters`` and the outputs on request, the ensemble of the in-flight
batcher for the one-value inputs. Runs in workers: the threads that read the server's frames read requests, the
service's thread builds responses.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array, Request, Result, Strings
from conch.backends.base.backend_base import TRANSFORMERS
from conch.backends.generation.engine import Progress, TokenLogprobs
from conch.backends.generation.generation_backend import GenerationBackend
from conch.backends.generation.media import MediaItem, MediaPreparer
from conch.backends.generation.options import ServingOptions
from conch.backends.generation.sampling import Defaults, Limits, SamplingOverrides, read_document, refuse_unsupported
from conch.backends.generation.service import ImmediateResponse, ResponseBuilder
from conch.backends.io_formats.processor import MEDIA_INPUTS, MediaProcessor, PreparedMedia
from conch.backends.io_formats.shortening import Messages, dropped_parts, shortened
from conch.backends.tasks.task import TaskDescription, complete_config
from conch.backends.tasks.tokens import TOKEN_IDS, TOKENS, TokenDocuments
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.checkpoints.tokenizers.infilling import Infilling, infilling
from conch.checkpoints.tokenizers.open import open_tokenizer
from conch.checkpoints.tokenizers.stream import TextStream, spelt
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer
from conch.config.complete import ADAPTERS, CHAT_TEMPLATE, LOADS_ADAPTERS, OUTPUT_FORMAT
from conch.core.errors import ConchError, invalid, unsupported
from conch.core.inference import TensorSpec
from conch.core.sampling import TEXT_GENERATION
from conch.core.sampling.parameters import (
    DEFAULT_TEMPERATURE,
    DROP_OLDEST,
    PARAMETERS,
    SUFFIX,
    Feature,
    ReasoningTokens,
    SamplingParameter,
    SamplingParams,
)
from conch.core.sampling.structures import Structure, parsed
from conch.core.text_parameters import ADD_SPECIAL_TOKENS, SKIP_SPECIAL_TOKENS
from conch.machine.facts import openmp, usable_cores
from conch.wire.output.formats import INCLUDE_MARKS, UNKNOWN, OutputFormat, recognise
from conch.wire.output.tools import strict_calls
from conch.workers.child.channel import Channel, Header


class StopStrings:
    """The stop strings of a request, shared by all of its completions."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._sorted = sorted(strings)
        self._longest = max(len(string) for string in strings)

    def search(self, text: str) -> tuple[int, int] | None:
        """Return the start and end of the leftmost stop string in ``text``; None if there is none."""
        match = None
        for string in self._strings:
            start = text.find(string)
            if start >= 0 and (match is None or start < match[0]):
                match = start, start + len(string)
        return match

    def partial_match(self, text: str) -> int:
        """Return how many characters at the end of ``text`` may be the beginning of a stop string."""
        for count in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[len(text) - count :]
            # In sorted order, the strings that begin with ``end`` follow it.
            index = bisect_left(self._sorted, end)
            if index < len(self._sorted) and self._sorted[index].startswith(end):
                return count
        return 0


class StoppingText:
    """The text of a completion, released as soon as it cannot be part of a stop string."""

    __slots__ = ("_included", "_pending", "_stops", "stop")

    def __init__(self, stops: StopStrings | None, *, included: bool = False) -> None:
        self._stops = stops
        self._included = included  # whether the stop string is part of the text
        self._pending = ""
        #: The stop string that has been found, which ends the text.
        self.stop = ""

    def add(self, piece: str) -> str:
        """Add text; return the text that is released."""
        if self._stops is None or not piece:
            return piece
        text = self._pending + piece
        match = self._stops.search(text)
        if match is not None:
            self._pending = ""
            start, end = match
            self.stop = text[start:end]
            return text[: end if self._included else start]
        count = self._stops.partial_match(text)
        self._pending = text[len(text) - count :]
        return text[: len(text) - count]

    def flush(self) -> str:
        """Release the remaining text at the end of the completion."""
        pending, self._pending = self._pending, ""
        return pending


#: Number of tokens at the end of a prompt that may affect the text of the first generated tokens.
_CONTEXT: Final = 8


@dataclass(frozen=True, slots=True)
class TextOutputOptions:
    """Options for the responses of a request; ``outputs`` are the requested outputs except the text.

    ``prefix`` precedes the text: the prompt, if the request includes it, or a mark of reasoning at its end. ``stream``:
    send a response at every step. ``kept_tokens`` are special tokens that are not skipped.
    """

    stream: bool = False
    prefix: str = ""
    stop: StopStrings | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True
    kept_tokens: frozenset[int] = frozenset()
    outputs: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Sample:
    """A completion of a prompt.

    ``text``, ``count`` (of tokens), ``tokens`` and ``logprobs`` have not been sent yet; ``total`` counts all tokens.
    Stop strings have no effect in the first ``min_tokens`` tokens.
    """

    stream: TextStream
    stopping: StoppingText
    min_tokens: int
    text: list[str] = field(default_factory=list)
    count: int = 0
    total: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    cumulative: float = 0.0
    finish: str = ""

    def add(self, token: int, *, hidden: bool) -> str:
        """Add a token, whose text is not part of the completion if it is ``hidden``; return the text that is released.

        Sets ``finish`` at a stop string.
        """
        self.count += 1
        self.total += 1
        return self._release("" if hidden else self.stream.add([token]))

    def end(self, finish: str) -> str:
        """Return the remaining text of a completion that the engine ended."""
        text = self._release(self.stream.flush())
        if not self.finish:
            self.finish = finish
            text += self.stopping.flush()
        return text

    def _release(self, piece: str) -> str:
        if self.total <= self.min_tokens:
            return piece
        text = self.stopping.add(piece)
        if self.stopping.stop:
            self.finish = "stop"
        return text


class TextResponseBuilder(ResponseBuilder):
    """Builds the responses of a request in the I/O format ``text``."""

    def __init__(
        self,
        prompts: Sequence[tuple[list[int], SamplingParams]],
        options: TextOutputOptions,
        tokenizer: TextTokenizer,
        media: Sequence[MediaItem] = (),
    ) -> None:
        self.prompts = prompts
        self.media = media
        self._options = options
        self._tokenizer = tokenizer
        self._samples = [
            _Sample(
                tokenizer.stream(
                    skip_special_tokens=options.skip_special_tokens,
                    kept=options.kept_tokens,
                    after=[token for token in prompt[-_CONTEXT:] if token >= 0],  # without places of images
                ),
                StoppingText(options.stop, included=options.include_stop),
                sampling.min_tokens if sampling.beam_width == 1 else 0,
                [options.prefix] if options.prefix else [],
            )
            for prompt, sampling in prompts
            for _ in range(sampling.n)
        ]
        self._prompt_logprobs = ""  # JSON, until it has been sent
        self._begun = False  # whether a response has been sent
        self._cached = 0  # tokens of the prompt; those of the first sample, whose prefix the other samples share

    def add(self, index: int, progress: Progress) -> str:
        sample, options = self._samples[index], self._options
        hidden = progress.finish == "stop" and not options.include_stop  # the stop token is not part of the text
        text, tokens = "", progress.tokens
        for count, token in enumerate(tokens, 1):
            text += sample.add(token, hidden=hidden and count == len(tokens))
            if sample.finish:
                tokens = tokens[:count]  # tokens after a stop string are not part of the completion
                break
        if progress.finish and not sample.finish:
            text += sample.end(progress.finish)
        if text:
            sample.text.append(text)
        if "token_ids" in options.outputs:
            sample.tokens.extend(tokens)
        if progress.logprobs is not None:
            scored = list(zip(tokens, progress.logprobs, strict=False))
            sample.cumulative += sum(logprobs.logprob for _, logprobs in scored)
            if "logprobs" in options.outputs:
                sample.logprobs += [self._described(token, logprobs) for token, logprobs in scored]
        elif progress.cumulative_logprob is not None:
            sample.cumulative = progress.cumulative_logprob
        if index == 0 and progress.cached_tokens is not None:
            self._cached = progress.cached_tokens
        if progress.prompt_logprobs is not None:
            prompt = self.prompts[0][0]
            self._prompt_logprobs = json.dumps(
                # The first token has none, because it follows nothing.
                [None, *map(self._described, prompt[1:], progress.prompt_logprobs)]
            )
        return sample.finish

    def responses(self, final: bool) -> Sequence[Result]:
        options, samples = self._options, self._samples
        if not final and (not options.stream or not any(sample.text for sample in samples)):
            return ()
        outputs: dict[str, Array | Strings] = {"text_output": _strings(["".join(sample.text) for sample in samples])}
        if "finish_reason" in options.outputs:
            outputs["finish_reason"] = _strings([sample.finish for sample in samples])
        if "stop_reason" in options.outputs:
            outputs["stop_reason"] = _strings([sample.stopping.stop for sample in samples])
        if "cumulative_logprob" in options.outputs:
            outputs["cumulative_logprob"] = np.array([sample.cumulative for sample in samples], np.float32)
        if "logprobs" in options.outputs:
            outputs["logprobs"] = _strings([json.dumps(sample.logprobs or None) for sample in samples])
        if self._prompt_logprobs:
            outputs["prompt_logprobs"] = _strings([self._prompt_logprobs])
            outputs["prompt_tokens"] = _strings([self._tokenizer.piece(token) for token in self.prompts[0][0]])
            self._prompt_logprobs = ""
        if "num_input_tokens" in options.outputs:
            outputs["num_input_tokens"] = np.array([len(self.prompts[0][0])], np.uint32)
        if "num_cached_tokens" in options.outputs:
            outputs["num_cached_tokens"] = np.array([self._cached], np.uint32)
        if "num_output_tokens" in options.outputs:
            outputs["num_output_tokens"] = np.array([sample.count for sample in samples], np.uint32)
        if "token_ids" in options.outputs:
            outputs["token_ids"] = np.array([token for sample in samples for token in sample.tokens], np.int32)
        if "prompt_token_ids" in options.outputs and not self._begun:
            outputs["prompt_token_ids"] = np.array([max(token, -1) for token in self.prompts[0][0]], np.int32)
        self._begun = True
        for sample in samples:
            sample.text, sample.tokens, sample.logprobs, sample.count = [], [], [], 0
        return (Result(outputs),)

    def _described(self, token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        """Return the logprobs of a position by token id, in vLLM's format: the sampled token comes first."""
        described = {str(token): self._alternative(token, logprobs.logprob, logprobs.rank)}
        for rank, (other, logprob) in enumerate(logprobs.top, 1):
            described.setdefault(str(other), self._alternative(other, logprob, rank))
        return described

    def _alternative(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        text = self._tokenizer.piece(token)
        described: dict[str, Any] = {"logprob": logprob, "rank": rank or None, "decoded_token": text}
        if "\ufffd" in text:  # a part of a character
            described["bytes"] = list(spelt(self._tokenizer.token(token)))
        return described


def _strings(texts: list[str]) -> Strings:
    return Strings((len(texts),), texts)


#: Sampling parameters that are inputs: single values, and lists of words.
_VALUES: Final = tuple(known for known in PARAMETERS if known.text_input and known.type.dims == (1,))
_WORDS: Final = tuple(known for known in PARAMETERS if known.text_input and known.type.dims != (1,))
#: Flag inputs, and the outputs that each of them requests.
_RETURN_FLAGS: Final[Mapping[str, tuple[str, ...]]] = {
    "return_finish_reason": ("finish_reason",),
    "return_stop_reason": ("stop_reason",),
    "return_cumulative_logprob": ("cumulative_logprob",),
    "return_logprobs": ("logprobs",),
    "return_num_input_tokens": ("num_input_tokens",),
    "return_num_output_tokens": ("num_output_tokens",),
    "return_num_cached_tokens": ("num_cached_tokens",),
    "return_token_ids": ("token_ids",),
    "return_prompt_token_ids": ("prompt_token_ids",),
    "return_log_probs": ("cumulative_logprob", "logprobs"),
}
_TEXTS: Final = ("text_input", SUFFIX, "messages", "tools", "chat_template_kwargs", "sampling_parameters")
_FLAGS: Final = ("stream", "exclude_input_in_output", "tokenize_only", INCLUDE_MARKS, DROP_OLDEST)


def _input_of(parameter: SamplingParameter) -> TensorSpec:
    return TensorSpec(parameter.text_input, parameter.type.datatype, parameter.type.dims, optional=True)


INPUTS: Final = (
    *(TensorSpec(name, "BYTES", (1,), optional=True) for name in _TEXTS),
    *(TensorSpec(name, "BOOL", (1,), optional=True) for name in _FLAGS),
    *map(_input_of, _VALUES),
    TensorSpec(DEFAULT_TEMPERATURE, "FP32", (1,), optional=True),
    TensorSpec("pad_id", "INT32", (1,), optional=True),
    *map(_input_of, _WORDS),
    *(TensorSpec(name, "BOOL", (1,), optional=True) for name in _RETURN_FLAGS),
    TOKEN_IDS,
)
OUTPUTS: Final = (
    TensorSpec("text_output", "BYTES", (-1,)),
    TensorSpec("finish_reason", "BYTES", (-1,)),
    TensorSpec("stop_reason", "BYTES", (-1,)),
    TensorSpec("cumulative_logprob", "FP32", (-1,)),
    TensorSpec("logprobs", "BYTES", (-1,)),
    TensorSpec("prompt_logprobs", "BYTES", (1,)),
    TensorSpec("prompt_tokens", "BYTES", (-1,)),
    TensorSpec("num_input_tokens", "UINT32", (1,)),
    TensorSpec("num_output_tokens", "UINT32", (-1,)),
    TensorSpec("num_cached_tokens", "UINT32", (1,)),
    TensorSpec("token_ids", "INT32", (-1,)),
    TensorSpec("prompt_token_ids", "INT32", (-1,)),
    TOKENS,
)


@dataclass(frozen=True)
class TextInterface:
    """Reads the requests of a model.

    ``decoupled`` allows streaming of responses. ``truncate`` shortens prompts that exceed the context.
    ``output_format`` is how the model writes reasoning and tool calls. ``media`` reads images and recordings; without
    it, ``media_problem`` is the reason.
    """

    tokenizer: TextTokenizer
    defaults: Defaults
    limits: Limits
    decoupled: bool
    media: MediaProcessor | None = None
    media_problem: str = ""
    truncate: bool = False
    output_format: OutputFormat = UNKNOWN

    @cached_property
    def marks(self) -> frozenset[int]:
        """The special tokens of the output format."""
        ids = map(self.tokenizer.token_id, self.output_format.tokens)
        return self.tokenizer.special.all_ids.intersection(id for id in ids if id is not None)

    @cached_property
    def infilling(self) -> Infilling | None:
        """The marks with which the model fills in the middle of a text."""
        return infilling(self.tokenizer)

    def response_builder(self, request: Request) -> ResponseBuilder:
        """Read a request and create its response builder. Raises INVALID_ARG or UNSUPPORTED, in one sentence."""
        if TOKENS.name in request.outputs:
            return ImmediateResponse(self._tokens(request))
        if ADD_SPECIAL_TOKENS in request.parameters:
            raise invalid(f"'{ADD_SPECIAL_TOKENS}' applies only to the output '{TOKENS.name}'", ADD_SPECIAL_TOKENS)
        overrides = _overrides(request)
        stream = bool(request.option("stream", False))
        if stream and not self.decoupled:
            raise invalid("Streaming is only supported in decoupled mode.")
        # A structure allows calls even of tools that are not in the prompt.
        text, prompt, items = self._prompt(request, optional_tools="structured_outputs" in overrides.values)
        chat = "messages" in request.inputs
        source = TOKEN_IDS.name if TOKEN_IDS.name in request.inputs else "messages" if chat else "text_input"
        if request.has(SUFFIX):
            prompt = self._infilled(request, overrides, text if source == "text_input" else prompt, items)
        if request.option("tokenize_only", False):
            counted = np.array([len(prompt)], np.uint32)
            return ImmediateResponse(Result({"text_output": _strings([""]), "num_input_tokens": counted}))
        if chat and request.option(DROP_OLDEST, False):
            text, prompt, items = self._shortened(request, overrides, (text, prompt, items))
        exclude = request.option("exclude_input_in_output", stream or chat)
        if stream and not exclude:
            raise invalid("When streaming, `exclude_input_in_output` = False is not allowed.")
        whole = prompt
        prompt, sampling = self._sampling(overrides, prompt, source, request.option(DEFAULT_TEMPERATURE))
        if (items or request.has(SUFFIX)) and len(prompt) < len(whole):
            raise invalid("a prompt with images, recordings or a suffix cannot be truncated", source)
        marks = bool(request.option(INCLUDE_MARKS, False))
        opened = marks
        if marks and chat and sampling.structured_outputs is not None:
            sampling.reasoning = self._reasoning(text)
            # Without tokens for its marks, the model does not reason.
            opened = sampling.reasoning is not None
        elif marks and chat and (calls := self._strict_calls(request, sampling)) is not None:
            sampling.structured_outputs, sampling.reasoning = calls, self._reasoning(text)
        options = TextOutputOptions(
            stream=stream,
            prefix=text if not exclude else self._opened_reasoning(text) if opened else "",
            stop=StopStrings(sampling.stop) if sampling.stop else None,
            include_stop=sampling.include_stop_str_in_output,
            skip_special_tokens=sampling.skip_special_tokens,
            kept_tokens=self.marks if marks else frozenset(),
            outputs=frozenset(
                name for flag, names in _RETURN_FLAGS.items() if request.option(flag, False) for name in names
            ),
        )
        if sampling.logprobs is None and not options.outputs.isdisjoint(("logprobs", "cumulative_logprob")):
            sampling.logprobs = 0
            self.limits.check_features(sampling)
        # A beam search is one engine request; samples are one engine request each.
        sequences = [sampling] if sampling.beam_width > 1 else [sampling.for_sample(i) for i in range(sampling.n)]
        return TextResponseBuilder([(prompt, sequence) for sequence in sequences], options, self.tokenizer, items)

    def _infilled(
        self,
        request: Request,
        overrides: SamplingOverrides,
        prefix: str | list[int],
        items: Sequence[MediaItem],
    ) -> list[int]:
        """Return the prompt for the text between ``prefix`` and the suffix of a request, which ends at the marks.

        Raises UNSUPPORTED for a model without fill-in-the-middle.
        """
        if self.infilling is None:
            raise unsupported("the model has no tokens for fill-in-the-middle", param=SUFFIX)
        if items or "messages" in request.inputs:
            raise invalid(f"'{SUFFIX}' only applies to texts", SUFFIX)
        overrides.values["stop_token_ids"] = (*overrides.get("stop_token_ids", ()), *self.infilling.ends)
        return self.infilling.prompt(self.tokenizer, prefix, request.option(SUFFIX))

    def _strict_calls(self, request: Request, sampling: SamplingParams) -> Structure | None:
        """Return the structure of the calls that the model begins itself; None if no tool is strict.

        Also None if the engine or the format of the model does not support it.
        """
        engine = self.limits.engine
        if not engine.partial_structures or Feature.JSON not in engine.features or sampling.beam_width > 1:
            return None
        tools = _document(request, "tools", list)
        return None if tools is None else strict_calls(tools, self.output_format.call_format.grammar)

    def _reasoning(self, prompt: str) -> ReasoningTokens | None:
        """Return the tokens around the reasoning that may come before a structure; None if the structure comes first.

        None also if the prompt already ends the reasoning, if the engine has no partial structures, or if a mark is not
        a single token.
        """
        marks = self.output_format.reasoning
        if not marks or not self.limits.engine.partial_structures or prompt.rstrip().endswith(marks[-1]):
            return None
        first, last = map(self.tokenizer.token_id, marks)
        if first is None or last is None or self.output_format.calls == "harmony":
            return None
        return ReasoningTokens(first, last, bool(self._opened_reasoning(prompt)))

    def _opened_reasoning(self, prompt: str) -> str:
        """Return the mark that begins reasoning if the prompt ends with it."""
        opened = self.output_format.reasoning[:1]
        return opened[0] if opened and prompt.rstrip().endswith(opened) else ""

    def _tokens(self, request: Request) -> Result:
        """Return the tokens of the prompt of a request, or the text of its token ids."""
        others = request.outputs - {TOKENS.name}
        if others:
            raise invalid(f"output '{TOKENS.name}' cannot be requested together with '{min(others)}'")
        documents = TokenDocuments(self.tokenizer, self.limits.remaining(0))
        if TOKEN_IDS.name in request.inputs:
            skip = bool(request.parameters.get(SKIP_SPECIAL_TOKENS, True))
            rows = documents.of_ids(documents.ids(request), skip_special=skip)
        else:
            text, chat = self._text(request, optional_tools=False)
            items = self._items(request)
            text = text if self.media is None else self.media.expand(text, items)
            rows = documents.of_texts([text], special=bool(request.parameters.get(ADD_SPECIAL_TOKENS, not chat)))
        return documents.result(rows, (len(rows),))

    def _prompt(self, request: Request, *, optional_tools: bool) -> tuple[str, list[int], Sequence[MediaItem]]:
        """Return the prompt as text and as token ids, and its images and recordings.

        Raises INVALID_ARG if it is missing or empty.
        """
        items = self._items(request)
        if TOKEN_IDS.name in request.inputs:
            ids = request.array(TOKEN_IDS.name).reshape(-1).tolist()
            if "messages" in request.inputs:
                raise invalid(f"either '{TOKEN_IDS.name}' or 'messages' must be given, not both", TOKEN_IDS.name)
            if not ids:
                raise invalid(f"'{TOKEN_IDS.name}' is empty: there is nothing to continue", TOKEN_IDS.name)
            self.limits.check_token_ids(f"input '{TOKEN_IDS.name}'", ids, TOKEN_IDS.name)
            if self.media is not None:
                self.media.check(ids, items)
            return self.tokenizer.decode(ids), ids, items
        text, chat = self._text(request, optional_tools=optional_tools)
        prompt = [] if request.has(SUFFIX) and not chat else self._encoded(text, items, chat=chat)
        if not prompt and chat:
            raise invalid(
                "the chat template makes an empty text of 'messages': there is nothing to continue", "messages"
            )
        if not prompt and not request.has(SUFFIX):
            raise invalid("'text_input' is empty: there is nothing to continue", "text_input")
        return text, prompt, items

    def _encoded(self, text: str, items: Sequence[MediaItem], *, chat: bool) -> list[int]:
        """Return the token ids of a prompt with its images and recordings."""
        if self.media is not None and items:
            return self.media.encode(text, items, self.tokenizer, special_tokens=not chat)
        return self.tokenizer.encode(text, special_tokens=not chat)

    def _reserved(self, overrides: SamplingOverrides) -> int:
        """Return the tokens that a prompt leaves to the completion if it is shortened."""
        tokens: int = overrides.get("max_tokens") or min(self.defaults.max_tokens, self.limits.remaining(0) // 2)
        return tokens

    def _shortened(
        self, request: Request, overrides: SamplingOverrides, whole: tuple[str, list[int], Sequence[MediaItem]]
    ) -> tuple[str, list[int], Sequence[MediaItem]]:
        """Return the prompt of a conversation without its oldest messages, so that it fits into the context.

        Returns ``whole``, the prompt of all messages, if it fits, or if the newest ones alone do not.
        """
        room = self.limits.remaining(self._reserved(overrides))
        if len(whole[1]) <= room:
            return whole
        #: By the number of messages.
        prompts: dict[int, tuple[str, list[int], Sequence[MediaItem]]] = {}
        messages = _document(request, "messages", list)

        def prompt_of(kept: Messages) -> tuple[str, list[int], Sequence[MediaItem]]:
            left = dropped_parts(messages, kept)
            items = []
            for item in whole[2]:
                if left[item.kind]:
                    left[item.kind] -= 1
                else:
                    items.append(item)
            text = self._conversation(request, kept, optional_tools=True)
            return text, self._encoded(text, items, chat=True), items

        def fits(kept: Messages) -> bool:
            try:
                prompt = prompts[len(kept)] = prompt_of(kept)
            except ConchError:  # a template may demand messages that have been dropped
                return False
            return len(prompt[1]) <= room

        kept = shortened(messages, fits)
        return whole if kept is None else prompts[len(kept)]

    def _items(self, request: Request) -> Sequence[MediaItem]:
        """Return the images and recordings of a request. Raises UNSUPPORTED if the model reads none of their kind."""
        marks = self.media.marks if self.media is not None else {}
        for spec in MEDIA_INPUTS:
            if request.has(spec.name) and spec.name not in marks:
                reads = " and ".join(f"'{kind}'" for kind in marks)
                reason = f"it reads {reads}" if marks else self.media_problem or "it has no processor"
                raise unsupported(f"the model does not read '{spec.name}': {reason}")
        return self.media.items(request) if self.media is not None else ()

    def _text(self, request: Request, *, optional_tools: bool) -> tuple[str, bool]:
        """Return the prompt as text, and whether it is a conversation, whose text has its special tokens.

        ``optional_tools``: a template that has no place for tools is rendered without them. Raises INVALID_ARG if the
        prompt is missing.
        """
        text = request.option("text_input")
        messages = request.option("messages")
        if (text is None) == (messages is None):
            raise invalid(
                "either 'text_input' or 'messages' must be given" + (", not both" if text is not None else ""),
                "messages",
            )
        if text is not None:
            return text, False
        return self._conversation(request, _document(request, "messages", list), optional_tools=optional_tools), True

    def _conversation(self, request: Request, messages: Any, *, optional_tools: bool) -> str:
        """Return the prompt for ``messages``, with the tools and template values of a request."""
        variables = _document(request, "chat_template_kwargs", dict) or {}
        taken = {"self", "messages", "tools", "optional_tools"} & set(variables)
        if taken:
            raise invalid(f"input 'chat_template_kwargs' must not have '{taken.pop()}'", "chat_template_kwargs")
        return self.tokenizer.chat(
            self._with_parts(request, messages),
            tools=_document(request, "tools", list),
            optional_tools=optional_tools,
            **variables,
        )

    def _with_parts(self, request: Request, messages: Any) -> Any:
        """Return messages with contents as the chat template reads them: lists of parts, or texts."""
        if self.media is None:
            return messages
        self.media.check_parts(messages, {spec.name for spec in MEDIA_INPUTS if request.has(spec.name)})
        return self.media.with_parts(messages, self.tokenizer.template)

    def _sampling(
        self, overrides: SamplingOverrides, prompt: list[int], source: str, temperature: float | None
    ) -> tuple[list[int], SamplingParams]:
        """Return the prompt, truncated if allowed, and its sampling parameters.

        ``source`` is the input with the prompt, ``temperature`` the default that comes with the request. Raises as
        :meth:`Limits.check` does.
        """
        if (last := overrides.get("truncate_prompt_tokens")) is not None:
            prompt = prompt[-last:]
        if self.truncate:
            prompt = prompt[-max(self.limits.remaining(self._reserved(overrides)), 1) :]
        sampling = self.defaults.sampling(
            overrides, self.limits.remaining(len(prompt)), chat=source == "messages", temperature=temperature
        )
        sampling.bad_words_token_ids = self._token_ids_of_words(sampling.bad_words)
        self.limits.check(prompt, sampling, source)
        return prompt, sampling

    def _token_ids_of_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of each word, with and without a space before it."""
        forms = [
            tuple(self.tokenizer.encode(form, special_tokens=False)) for word in words for form in (word, f" {word}")
        ]
        return tuple(dict.fromkeys(form for form in forms if form))


def _overrides(request: Request) -> SamplingOverrides:
    """Collect the sampling parameters of a request from its inputs and its JSON document, or else its parameters."""
    overrides = SamplingOverrides()
    document = request.option("sampling_parameters")
    if document is not None:
        read_document(overrides, document, "sampling_parameters")
    else:
        for name, value in request.parameters.items():
            if not overrides.set(name, value, f"parameter '{name}'"):
                refuse_unsupported(name, value)
    for name in (parameter.text_input for parameter in _VALUES):
        if name in request.inputs:
            overrides.set(name, request.option(name), f"input '{name}'")
    for name in (parameter.text_input for parameter in _WORDS):
        if name in request.inputs:
            overrides.set(name, request.texts(name), f"input '{name}'")
    overrides.check()
    return overrides


def _document(request: Request, name: str, kind: type) -> Any:
    """Return the value of a JSON input; None if it is absent. Raises INVALID_ARG if it is not of ``kind``."""
    text = request.option(name)
    if text is None:
        return None
    document = parsed(f"input '{name}'", text)
    if not isinstance(document, kind):
        raise invalid(f"input '{name}' must be a JSON {'list' if kind is list else 'object'}", name)
    return document


def complete_text_config(config: Mapping[str, Any], *, media: bool = False) -> dict[str, Any]:
    """Return a configuration (JSON object) with missing tensors, ``decoupled`` and task filled in.

    ``media``: the model may read images or recordings.
    Requests have no batch dimension, because each joins the running batch. Raises INVALID_ARG for tensors that such a
    model does not have, and for a ``max_batch_size`` above 0.
    """
    if int(config.get("max_batch_size") or 0) > 0:
        raise invalid(
            f"model '{config.get('name', '')}' has max_batch_size {config['max_batch_size']}, but a text model takes "
            "requests one by one into a running batch: set max_batch_size to 0 and, to bound that batch, "
            "parameter 'max_num_seqs'"
        )
    completed = complete_config(
        config, TaskDescription((*INPUTS, *MEDIA_INPUTS) if media else INPUTS, OUTPUTS, max_batch_size=0)
    )
    policy = dict(config.get("model_transaction_policy") or {})
    if "model_transaction_policy" not in config:
        policy["decoupled"] = True
    completed["model_transaction_policy"] = policy
    parameters = dict(config.get("parameters") or {})
    parameters.setdefault("task", {"string_value": TEXT_GENERATION})
    completed["parameters"] = parameters
    return completed


class TextBackend(GenerationBackend):
    """A text generation checkpoint with the I/O format ``text``."""

    def __init__(self, channel: Channel, init: Header, checkpoint: Checkpoint | None = None) -> None:
        super().__init__(channel, init)
        self._checkpoint = checkpoint or self.open_checkpoint()

    def open_checkpoint(self) -> Checkpoint:
        """Open the checkpoint that the configuration names. Raises INVALID_ARG."""
        return Checkpoint.open(Path(self.model["version_directory"]), Options.from_config(self.config))

    def complete(self) -> str:
        return json.dumps(complete_text_config(self.config, media=self._checkpoint.reads_media))

    def defaults(self, generation: Mapping[str, Any], settings: ServingOptions) -> Defaults:
        """Return the default sampling parameters; ``generation`` is generation_config.json."""
        return Defaults.of_checkpoint(generation, settings.max_tokens, settings.default_temperature)

    def arguments(self, engine: str) -> Mapping[str, Any]:
        """Return arguments that are passed unchanged to the library of the named engine."""
        return {}

    def preloads(self, instance: Mapping[str, Any]) -> tuple[Sequence[str], dict[str, str]]:
        """Return the modules that ``load`` imports for ``instance``, and the environment variables to set before."""
        if self.choose_engine(self._checkpoint, instance) != "transformers":
            return (), {}
        return TRANSFORMERS, openmp(self._checkpoint.options.threads or usable_cores(), 1)

    def _output_format(
        self, checkpoint: Checkpoint, tokenizer: TextTokenizer, settings: ServingOptions
    ) -> OutputFormat:
        """Return the output format that the configuration names, or that of the chat template."""
        described = (checkpoint.json("tokenizer_config.json") or {}).get("response_template")
        recognised = recognise(tokenizer.template.templates.values(), described)
        return replace(recognised, calls=settings.output_format, marks=()) if settings.output_format else recognised

    def _media(
        self, checkpoint: Checkpoint, instance: Mapping[str, Any], preparer: MediaPreparer | None = None
    ) -> tuple[MediaProcessor | None, str]:
        """Return the processor of images and recordings, or None and the reason. The ``preparer`` is the engine's."""
        if not checkpoint.reads_media:
            return None, ""
        engine = self.choose_engine(checkpoint, instance)
        reader = "transformers" if checkpoint.gguf is None else "llamacpp"
        if engine != reader:
            return None, f"engine '{engine}' serves it, and only engine '{reader}' reads its images and sound"
        if checkpoint.gguf is not None and preparer is None:
            return None, ""
        try:
            return MediaProcessor(checkpoint) if preparer is None else PreparedMedia(checkpoint, preparer), ""
        except ConchError as error:
            self.warn_of(f"it reads only text: {error.message}")
            return None, error.message

    def load(self, instance: Mapping[str, Any]) -> None:
        checkpoint = self._checkpoint
        self.warn_of(checkpoint.warning)
        os.environ.update(self.preloads(instance)[1])
        settings = ServingOptions.from_checkpoint(checkpoint)
        tokenizer = open_tokenizer(checkpoint, chat_template=settings.chat_template)
        if broken := tokenizer.template.compile(checkpoint.extra):
            self.warn_of(f"it refuses conversations: {broken}")
        media, problem = self._media(checkpoint, instance)
        engine = self.open_engine(
            checkpoint, instance, tokenizer, self.arguments, media.spec if media is not None else None
        )
        if engine.preparer is not None:
            media, problem = self._media(checkpoint, instance, engine.preparer)
        elif not problem and checkpoint.reads_media and (media is None or engine.media != media.marks.keys()):
            media, problem = None, engine.warnings[0] if engine.warnings else "the engine does not"
        self.runtime_facts[CHAT_TEMPLATE] = "yes" if tokenizer.template else "none"
        output_format = self._output_format(checkpoint, tokenizer, settings)
        self.runtime_facts[OUTPUT_FORMAT] = output_format.dumps()
        if checkpoint.options.adapter_folders:
            self.runtime_facts[LOADS_ADAPTERS] = "yes"
        if engine.adapters:
            self.runtime_facts[ADAPTERS] = json.dumps(engine.adapters)
        io_format = TextInterface(
            tokenizer,
            self.defaults(checkpoint.json("generation_config.json") or {}, settings),
            Limits(engine),
            decoupled=self.decoupled,
            media=media,
            media_problem=problem,
            truncate=settings.truncate,
            output_format=output_format,
        )
        self.serve(engine, io_format, reserve=settings.reserve)
        del self._checkpoint  # frees the vocabulary of a GGUF file, tens of megabytes
