"""From tokens to the outputs of the text contract.  Used by the service's thread."""

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

#: Tokens at the end of a prompt on which the spelling of the first tokens after it may depend.
_CONTEXT: Final = 8


@dataclass(frozen=True, slots=True)
class TextOutputOptions:
    """How the responses of a request are made; ``outputs`` are those that it asks for besides the text.

    ``prefix`` goes before the text: the prompt, where it is wanted back.  ``stream`` asks for a response at every step.
    """

    stream: bool = False
    prefix: str = ""
    stop: StopStrings | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True
    outputs: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Sample:
    """A continuation of a prompt.

    ``text``, ``count`` (of tokens), ``tokens`` and ``logprobs`` have not been sent yet; ``total`` counts all tokens.
    Stop strings have no effect in the first ``min_tokens`` of them.
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


class TextResponseBuilder(ResponseBuilder):
    """Makes the responses of a request for text."""

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
        sample.total += len(tokens)
        if "token_ids" in options.outputs:
            sample.tokens.extend(tokens)
        if progress.logprobs is not None:
            sample.cumulative += sum(position.logprob for position in progress.logprobs)
            if "logprobs" in options.outputs:
                sample.logprobs += [
                    self._described(token, logprobs) for token, logprobs in zip(tokens, progress.logprobs, strict=True)
                ]
        elif progress.cumulative_logprob is not None:
            sample.cumulative = progress.cumulative_logprob
        if progress.finish == "stop" and not options.include_stop:
            tokens = tokens[:-1]  # what ends a text is not part of it
        piece = sample.stream.add(tokens)
        if progress.finish:
            piece += sample.stream.flush()
        text = sample.stopping.add(piece) if sample.total > sample.min_tokens else piece
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
        if "finish_reason" in options.outputs:
            outputs["finish_reason"] = _strings([sample.finish for sample in samples])
        if "cumulative_logprob" in options.outputs:
            outputs["cumulative_logprob"] = np.array([sample.cumulative for sample in samples], np.float32)
        if "logprobs" in options.outputs:
            outputs["logprobs"] = _strings([json.dumps(sample.logprobs or None) for sample in samples])
        if "num_input_tokens" in options.outputs:
            outputs["num_input_tokens"] = np.array([len(self.prompts[0][0])], np.uint32)
        if "num_output_tokens" in options.outputs:
            outputs["num_output_tokens"] = np.array([sample.count for sample in samples], np.uint32)
        if "token_ids" in options.outputs:
            outputs["token_ids"] = np.array([token for sample in samples for token in sample.tokens], np.int32)
        for sample in samples:
            sample.text, sample.tokens, sample.logprobs, sample.count = [], [], [], 0
        return (Result(outputs),)

    def _described(self, token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        """The alternatives of a position by token id, as vLLM returns them: the chosen token comes first."""
        described = {str(token): self._alternative(token, logprobs.logprob, logprobs.rank)}
        for rank, (other, logprob) in enumerate(logprobs.top, 1):
            described.setdefault(str(other), self._alternative(other, logprob, rank))
        return described

    def _alternative(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank or None, "decoded_token": self._tokenizer.piece(token)}


def _strings(texts: list[str]) -> Strings:
    return Strings((len(texts),), texts)
