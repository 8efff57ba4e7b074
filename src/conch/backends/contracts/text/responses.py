"""Tokens become text, with what a request wants to know besides.  Used by the thread that runs the engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from conch.backends.contracts.text.stops import StoppingText, StopStrings
from conch.backends.generation.engine import Progress, TokenLogprobs
from conch.backends.generation.request_state import ResponseBuilder
from conch.backends.native.arrays import Array, Result, Strings
from conch.checkpoints.tokenizers.stream import TextStream
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer
from conch.sampling.parameters import SamplingParams

#: Tokens of a prompt that may decide how the first tokens after it are spelt.
_CONTEXT: Final = 8


@dataclass(frozen=True, slots=True)
class TextOutputOptions:
    """What the responses of a request are to be.

    ``prefix`` goes before the text (the prompt, where it is wanted back).  The others are named after the inputs that
    ask for them.
    """

    stream: bool = False
    prefix: str = ""
    stop: StopStrings | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True
    finish_reason: bool = False
    cumulative_logprob: bool = False
    logprobs: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    token_ids: bool = False


@dataclass(slots=True)
class _Sample:
    """A continuation; ``text``, ``count``, ``tokens`` and ``logprobs`` are what has not gone out yet.

    Stop strings mean nothing in its first ``least`` tokens, of which it has ``made`` so many in all.
    """

    stream: TextStream
    stopping: StoppingText
    least: int
    text: list[str] = field(default_factory=list)
    count: int = 0
    made: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    cumulative: float = 0.0
    finish: str = ""


class TextResponseBuilder(ResponseBuilder):
    """The responses of a request that wants text."""

    def __init__(
        self, prompts: Sequence[tuple[list[int], SamplingParams]], options: TextOutputOptions, tokenizer: TextTokenizer
    ) -> None:
        self.prompts = prompts
        self._options = options
        self._tokenizer = tokenizer
        self._samples = [
            _Sample(
                tokenizer.stream(skip_special_tokens=options.skip_special_tokens, after=prompt[-_CONTEXT:]),
                StoppingText(options.stop, included=options.include_stop),
                sampling.min_tokens if sampling.beam_width == 1 else 0,
                [options.prefix] if options.prefix else [],
            )
            for prompt, sampling in prompts
            for _ in range(sampling.n)
        ]

    def add(self, index: int, progress: Progress) -> str:
        sample, options = self._samples[index], self._options
        tokens = progress.tokens
        sample.count += len(tokens)
        sample.made += len(tokens)
        if options.token_ids:
            sample.tokens.extend(tokens)
        if progress.logprobs is not None:
            sample.cumulative += sum(one.logprob for one in progress.logprobs)
            if options.logprobs:
                sample.logprobs += [
                    self._described(token, one) for token, one in zip(tokens, progress.logprobs, strict=True)
                ]
        elif progress.cumulative_logprob is not None:
            sample.cumulative = progress.cumulative_logprob
        if progress.finish == "stop" and not options.include_stop:
            tokens = tokens[:-1]  # what ends a text is not part of it
        piece = sample.stream.add(tokens)
        if progress.finish:
            piece += sample.stream.flush()
        text = sample.stopping.add(piece) if sample.made > sample.least else piece
        if sample.stopping.stopped:
            sample.finish = "stop"
        elif progress.finish:
            text += sample.stopping.flush()
            sample.finish = progress.finish
        if text:
            sample.text.append(text)
        return sample.finish

    def responses(self, final: bool) -> Sequence[Result]:
        options, samples = self._options, self._samples
        if not final and (not options.stream or not any(sample.text for sample in samples)):
            return ()
        outputs: dict[str, Array | Strings] = {"text_output": _strings(["".join(sample.text) for sample in samples])}
        if options.finish_reason:
            outputs["finish_reason"] = _strings([sample.finish for sample in samples])
        if options.cumulative_logprob:
            outputs["cumulative_logprob"] = np.array([sample.cumulative for sample in samples], np.float32)
        if options.logprobs:
            outputs["logprobs"] = _strings([json.dumps(sample.logprobs or None) for sample in samples])
        if options.num_input_tokens:
            outputs["num_input_tokens"] = np.array([len(self.prompts[0][0])], np.uint32)
        if options.num_output_tokens:
            outputs["num_output_tokens"] = np.array([sample.count for sample in samples], np.uint32)
        if options.token_ids:
            outputs["token_ids"] = np.array([token for sample in samples for token in sample.tokens], np.int32)
        for sample in samples:
            sample.text, sample.tokens, sample.logprobs, sample.count = [], [], [], 0
        return (Result(outputs),)

    def _described(self, token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        """A position as vLLM has it: the chosen token first, then the likeliest ones."""
        described = {str(token): self._alternative(token, logprobs.logprob, logprobs.rank)}
        for rank, (other, logprob) in enumerate(logprobs.top, 1):
            described.setdefault(str(other), self._alternative(other, logprob, rank))
        return described

    def _alternative(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank or None, "decoded_token": self._tokenizer.piece(token)}


def _strings(texts: list[str]) -> Strings:
    return Strings((len(texts),), texts)
