"""Completions: the request with its prompts, and the response as an object or chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from conch.core.inference import ModelSignature
from conch.core.sampling.parameters import MAX_LOGPROBS, MAX_SAMPLES, SUFFIX
from conch.core.sampling.values import INT32
from conch.core.tensors import WireTensor
from conch.wire.openai.inputs import generation_inputs, text_tensor, token_tensor
from conch.wire.openai.models import PROMPT, TOKEN_IDS
from conch.wire.openai.reading import ApiError, Fields, wrong
from conch.wire.openai.response import (
    ChoiceDelta,
    OpenAiResponse,
    ResponsePlan,
    Token,
    completion_logprobs,
    prompt_tokens,
)
from conch.wire.openai.sampling import IGNORED, Decoding, read_marks, read_sampling, read_stream

#: Maximum number of prompts in a request; each becomes a request to the model.
MAX_PROMPTS: Final = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionPlan(ResponsePlan):
    """The plan of a completion; ``echoes`` has the text before the choices of each prompt: the prompt or nothing.

    ``scored``: choices have the log-probabilities of the prompt, as in vLLM. ``echoes_tokens``: their log-probabilities
    begin with those of the prompt.
    """

    echoes: list[str]
    scored: bool = False
    echoes_tokens: bool = False

    def answer(self, model: str) -> CompletionResponse:
        return CompletionResponse(self, model)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(Decoding):
    """A checked completion request; every prompt, a text or token ids, gets ``n`` choices.

    ``suffix`` is the text after the completions, empty if none.
    """

    prompts: list[str | list[int]]
    suffix: str
    echo: bool
    prompt_logprobs: int | None

    def inputs(self, signature: ModelSignature) -> list[dict[str, WireTensor]]:
        """Return the inputs of the requests to the model, one per prompt. Raises ApiError."""
        if self.plan.echoes_tokens and "prompt_tokens" not in signature.outputs:
            raise ApiError(f"model '{signature.name}' does not support 'echo' with 'logprobs'", "echo")
        if self.suffix and SUFFIX not in signature.inputs:
            raise ApiError(f"model '{signature.name}' has no input for '{SUFFIX}'", SUFFIX)
        suffix = {SUFFIX: self.suffix.encode()} if self.suffix else {}
        # All inputs but the prompt are the same for all texts, and for all lists of token ids.
        common = {
            is_text: generation_inputs(
                signature,
                suffix,
                self.sampling,
                stream=self.stream,
                echo=self.echo and not is_text,
                logprobs=self.logprobs,
                prompt_logprobs=self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs,
                token_ids=self.token_ids,
            )
            for is_text in {isinstance(prompt, str) for prompt in self.prompts}
        }
        return [
            {**common[True], PROMPT: text_tensor(signature, PROMPT, [prompt.encode()])}
            if isinstance(prompt, str)
            else {**common[False], TOKEN_IDS: token_tensor(signature, prompt)}
            for prompt in self.prompts
        ]

    @property
    def plan(self) -> CompletionPlan:
        return CompletionPlan(
            echoes=[prompt if self.echo and isinstance(prompt, str) else "" for prompt in self.prompts],
            echoes_tokens=self.echo and self.logprobs is not None,
            scored=self.prompt_logprobs is not None,
            **self.common,
        )


def read_completion(fields: Fields) -> CompletionRequest:
    """Read the members of a completion, except ``model``. Raises ApiError for invalid or unknown ones."""
    suffix = fields.text(SUFFIX) or ""
    prompts = read_prompts(fields, "prompt", MAX_PROMPTS, empty=bool(suffix))
    streaming = read_stream(fields)
    stream = streaming["stream"]
    sampling, members = read_sampling(fields)
    n = sampling.get("n", 1)
    if len(prompts) * n > MAX_PROMPTS:
        raise ApiError(f"{len(prompts)} prompts with n={n} are more than {MAX_PROMPTS} choices", "n")
    if fields.integer("best_of", 1, MAX_SAMPLES) not in (None, n):
        raise ApiError(f"'best_of' must be n ({n}): selecting the best of more choices is not supported", "best_of")
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    echo = fields.flag("echo")
    if echo and stream and (logprobs is not None or not all(isinstance(prompt, str) for prompt in prompts)):
        raise ApiError("'echo' in a stream is only supported for texts without 'logprobs'", "echo")
    prompt_logprobs = fields.integer("prompt_logprobs", 0, MAX_LOGPROBS)
    if echo and None not in (logprobs, prompt_logprobs) and prompt_logprobs != logprobs:
        raise ApiError("'prompt_logprobs' must be 'logprobs' if 'echo' is true", "prompt_logprobs")
    if stream and prompt_logprobs is not None:
        raise ApiError("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
    if suffix and echo and logprobs is not None:
        raise ApiError("'echo' with 'logprobs' is not supported with a 'suffix'", "echo")
    marks = read_marks(fields)
    fields.ignore(*IGNORED)
    fields.finish()
    return CompletionRequest(
        prompts=prompts,
        suffix=suffix,
        sampling=sampling,
        members={**members, PROMPT: "prompt", TOKEN_IDS: "prompt", **({"prompt_logprobs": "echo"} if echo else {})},
        logprobs=logprobs,
        echo=echo,
        prompt_logprobs=prompt_logprobs,
        **streaming,
        **marks,
    )


def read_prompts(fields: Fields, member: str, limit: int, *, empty: bool = False) -> list[str | list[int]]:
    """Read one prompt or a list of at most ``limit``, each a text, ``empty`` if it may be, or a list of token ids.

    Raises ApiError.
    """
    value = fields.required(member)
    if value == []:
        raise ApiError(f"{member} must be non-empty", member)
    several = type(value) is list and type(value[0]) is not int
    prompts = value if several else [value]
    if len(prompts) > limit:
        raise ApiError(f"'{member}' has {len(prompts)} elements; at most {limit} are allowed", member)
    for index, prompt in enumerate(prompts):
        path = f"{member}[{index}]" if len(prompts) > 1 else member
        if not isinstance(prompt, str | list):
            raise wrong(path, prompt, "a string or an array of strings or of token ids")
        if not prompt and not (empty and prompt == ""):
            raise ApiError(f"{member} must be non-empty", path)
        if type(prompt) is list and any(type(token) is not int or not 0 <= token <= INT32 for token in prompt):
            raise wrong(path, prompt, "an array of token ids")
    return prompts


class CompletionResponse(OpenAiResponse):
    """The response to a completion: ``n`` choices for the first prompt, then those for the second, and so on."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, plan: CompletionPlan, model: str) -> None:
        count = len(plan.echoes) * plan.choices
        super().__init__(model, count, plan)
        self._top = plan.logprobs
        self._scored = plan.scored
        self._prompts: list[Any] = [None] * count
        # The prompt of each choice until it has been sent, if the client requests ``echo``.
        self._echoes = [text for text in plan.echoes for _ in range(plan.choices)]
        self._offsets = [0] * count
        self._echoes_tokens = plan.echoes_tokens
        self._texts: list[list[str]] = [[] for _ in range(count)]
        self._tokens: list[list[Token]] = [[] for _ in range(count)]
        self._ids: list[list[int]] = [[] for _ in range(count)]
        self._has_ids = plan.token_ids
        #: The ids of the tokens of each prompt, if they are reported.
        self._prompt_ids: list[list[int] | None] = [None] * count

    def _chunks(self, index: int, piece: ChoiceDelta, end: str) -> list[dict[str, Any]]:
        text = self._text(index, piece)
        if not (text or piece.logprobs or piece.token_ids or piece.prompt_ids or end):
            return []
        logprobs = self._logprobs(index, piece.logprobs) if piece.logprobs else None
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": end or None}
        if piece.token_ids is not None:
            choice["token_ids"] = piece.token_ids
        if self._prompt_ids[index] is None and piece.prompt_ids is not None:
            choice["prompt_token_ids"] = self._prompt_ids[index] = piece.prompt_ids
        return [choice]

    def _keep(self, index: int, piece: ChoiceDelta, end: str) -> None:
        self._texts[index].append(self._text(index, piece))
        if self._echoes_tokens and piece.prompt_logprobs:
            self._tokens[index] += prompt_tokens(piece.prompt_logprobs, piece.prompt_tokens, self._top or 0)
        self._tokens[index] += piece.logprobs or ()
        self._ids[index] += piece.token_ids or ()
        self._prompt_ids[index] = piece.prompt_ids or self._prompt_ids[index]
        self._prompts[index] = piece.prompt_logprobs or self._prompts[index]

    def _choice(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(self._texts[index]),
            "logprobs": self._logprobs(index, self._tokens[index]) if self._top is not None else None,
            "finish_reason": self._ends[index],
            **({"token_ids": self._ids[index]} if self._has_ids else {}),
            **({"prompt_token_ids": ids} if (ids := self._prompt_ids[index]) is not None else {}),
            **({"prompt_logprobs": self._prompts[index]} if self._scored else {}),
        }

    def _text(self, index: int, piece: ChoiceDelta) -> str:
        echo, self._echoes[index] = self._echoes[index], ""
        return echo + piece.text

    def _logprobs(self, index: int, tokens: list[Token]) -> dict[str, Any]:
        logprobs, self._offsets[index] = completion_logprobs(tokens, self._offsets[index], self._top or 0)
        return logprobs
