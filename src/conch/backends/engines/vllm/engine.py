"""Runs vLLM's ``LLMEngine`` step by step in the worker.

vLLM manages the batch, the KV cache, preemption and prefix caching; this module translates requests and results. Beam
search is not supported.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from conch.backends.batching.json_schemas import rewrite
from conch.backends.batching.unique_items import UNIQUE
from conch.backends.engines.transformers.comparison import compare
from conch.backends.engines.vllm.arguments import BLOCK, engine_arguments
from conch.backends.generation.engine import (
    EngineRequest,
    EngineSpec,
    EngineUsage,
    GenerationEngine,
    Progress,
    TokenLogprobs,
    kv_token_bytes,
)
from conch.backends.generation.features import ENGINE_FEATURES
from conch.backends.generation.service import BROKEN
from conch.core.errors import ConchError, internal, invalid, one_line
from conch.core.sampling.parameters import NAMES, Feature, SamplingParams
from conch.core.sampling.structures import Structure

#: Arguments with which vLLM computes something else than the checkpoint does in transformers.
_CHANGING: Final = (
    "hf_overrides", "kv_cache_dtype", "load_format", "logits_processors", "logprobs_mode", "model_class_overrides",
    "model_weights", "quantization", "quantization_config",
)  # fmt: skip


@dataclass(slots=True)
class _Unfinished:
    """An unfinished request: the numbers of alternatives per token that it requests, and the structure of its output.

    ``prompt_alternatives`` is None if it does not request log-probabilities of the prompt, or has got them.
    """

    alternatives: int
    prompt_alternatives: int | None
    structure: Structure | None
    started: bool = False


class VllmEngine(GenerationEngine):
    """An ``LLMEngine`` of vLLM in this process."""

    name = "vllm"
    reserves_cache = True

    def __init__(self, vllm: Any, spec: EngineSpec) -> None:
        self._vllm = vllm
        self._statistics = _Statistics()
        self._engine = engine = self._start(spec)
        config = engine.vllm_config
        self.context = int(config.model_config.max_model_len)
        self.precision = str(config.model_config.dtype).removeprefix("torch.")
        self.max_sequences = int(config.scheduler_config.max_num_seqs)
        self.vocabulary = int(config.model_config.get_vocab_size())
        self.block_tokens = int(config.cache_config.block_size or BLOCK)
        self.cache_tokens = self.block_tokens * int(config.cache_config.num_gpu_blocks or 0)
        self.token_bytes = kv_token_bytes(spec.config, 4 if self.precision == "float32" else 2)
        self.adapters = tuple(spec.adapters)
        self.features = ENGINE_FEATURES[self.name] - (frozenset() if self.adapters else {Feature.LORA})
        self._adapters = {
            name: _lora_request(name, number, path) for number, (name, path) in enumerate(spec.adapters.items(), 1)
        }
        self._eos_ids = spec.eos_ids
        self._spec = spec
        self._requests: dict[int, _Unfinished] = {}
        self._warm_up()

    def _start(self, spec: EngineSpec) -> Any:
        """Load the model. Raises INVALID_ARG if vLLM refuses it or an argument, INTERNAL if vLLM fails."""
        vllm = self._vllm
        known = {field.name for field in dataclasses.fields(vllm.EngineArgs)}
        arguments, self.warnings = engine_arguments(spec, known)
        self._guided = arguments["structured_outputs_config"].backend == "guidance"
        wrong: tuple[type[Exception], ...] = (*_refusals(), OSError)
        try:
            engine = vllm.LLMEngine.from_engine_args(
                vllm.EngineArgs(**arguments), stat_loggers=[self._statistics.logger]
            )
        except wrong as error:
            raise invalid(f"engine 'vllm' cannot load '{spec.source}': {_sentence(error)}") from error
        except RuntimeError as error:
            raise internal(f"engine 'vllm' failed to load '{spec.source}': {one_line(error)}") from error
        executor = getattr(engine, "model_executor", None)
        if executor is not None:
            # vLLM reports the death of one of its processes only in the next step, which an idle engine never runs.
            executor.register_failure_callback(lambda: os._exit(BROKEN))
        return engine

    def add(self, request: EngineRequest) -> None:
        sampling = request.sampling
        structure = sampling.structured_outputs
        if structure is not None and structure.kind == "json" and self._guided:
            structure = Structure("json", _rewritten(structure.text))
        prompt: dict[str, Any] = {"prompt_token_ids": request.prompt}
        if sampling.cache_salt:
            prompt["cache_salt"] = sampling.cache_salt
        try:
            self._engine.add_request(
                str(request.id),
                prompt,
                _sampling_params(self._vllm, sampling, structure, self._eos_ids),
                lora_request=self._adapters[sampling.lora_name] if sampling.lora_name else None,
                priority=request.priority,
            )
        except _refusals() as error:
            raise invalid(_sentence(error), _parameter(error, sampling)) from error
        self._requests[request.id] = _Unfinished(
            sampling.logprobs or 0, sampling.prompt_logprobs, sampling.structured_outputs
        )

    def step(self) -> list[Progress]:
        if not self._requests:
            return []
        steps = map(self._progress, self._engine.step())
        return [progress for progress in steps if progress is not None]

    def cancel(self, id: int) -> None:
        if self._requests.pop(id, None) is not None:
            self._engine.abort_request([str(id)])

    def usage(self) -> EngineUsage:
        seen = self._statistics
        running = min(seen.running, len(self._requests)) if seen.known else len(self._requests)
        return EngineUsage(
            running=running,
            waiting=len(self._requests) - running,
            used_tokens=round(seen.usage * self.cache_tokens) if self._requests else 0,
            prefix_queries=seen.queries,
            prefix_hits=seen.hits,
            preemptions=seen.preemptions,
        )

    def verify(self, prompts: Sequence[list[int]]) -> str:
        return compare(self, self._spec, prompts, _obstacle(self._spec)) if self._spec.gguf is None else ""

    def forget(self) -> None:
        self._engine.reset_prefix_cache()
        self._statistics.clear()

    def _warm_up(self) -> None:
        """Run a request that samples, with log-probabilities.

        vLLM compiles code for the first request with log-probabilities. The compiler takes up to half a minute, during
        which the step would stall all requests; later loads on the machine find the code in a cache.
        """
        self.add(EngineRequest(0, [0], SamplingParams(max_tokens=1, logprobs=1)))
        while self.busy:
            self.step()
        self.forget()

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    def close(self) -> None:
        self._requests.clear()
        self._engine.engine_core.shutdown()
        del self._engine

    def _progress(self, output: Any) -> Progress | None:
        id = int(output.request_id)
        request = self._requests.get(id)
        if request is None:
            return None
        [completion] = output.outputs
        if output.finished:
            del self._requests[id]
        if output.finished and completion.finish_reason not in ("stop", "length"):
            if request.structure is not None and not request.started:
                # vLLM compiles structures after it has accepted the request; the worker log has the reason.
                refusal = invalid(f"vLLM cannot compile this {request.structure.kind}", "structured_outputs")
                return Progress(id, error=refusal)
            return Progress(id, error=internal(f"vLLM ended the request: {completion.finish_reason}"))
        tokens = list(completion.token_ids)
        request.started = request.started or bool(tokens)
        logprobs = None
        if completion.logprobs is not None:
            logprobs = [
                _logprobs(token, position, request.alternatives)
                for token, position in zip(tokens, completion.logprobs, strict=True)
            ]
        prompt_logprobs = None
        if request.prompt_alternatives is not None and output.prompt_logprobs is not None:
            positions = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
            prompt_logprobs = [_logprobs(token, position, request.prompt_alternatives) for token, position in positions]
            request.prompt_alternatives = None
        return Progress(
            id,
            tokens,
            completion.finish_reason or "",
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            cached_tokens=getattr(output, "num_cached_tokens", None),
        )


class _Statistics:
    """The latest statistics of vLLM's scheduler; implements vLLM's ``StatLogger``."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.known = False
        self.running = 0
        self.usage = 0.0
        self.queries = self.hits = self.preemptions = 0

    @property
    def logger(self) -> Callable[..., _Statistics]:
        """The factory that vLLM calls to create an engine's logger."""
        return lambda *_, **__: self

    def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *_: Any, **__: Any) -> None:
        if scheduler_stats is not None:
            self.known = True
            self.running = int(scheduler_stats.num_running_reqs)
            self.usage = float(scheduler_stats.kv_cache_usage)
            prefixes = scheduler_stats.prefix_cache_stats
            if prefixes is not None:
                self.queries += int(prefixes.queries)
                self.hits += int(prefixes.hits)
        if iteration_stats is not None:
            self.preemptions += int(iteration_stats.num_preempted_reqs)

    def log(self) -> None:
        pass

    def log_engine_initialized(self) -> None:
        pass

    def record_sleep_state(self, *_: Any, **__: Any) -> None:
        pass


def _obstacle(spec: EngineSpec) -> str:
    """Return the argument that prevents a comparison with transformers, in a sentence; empty if none."""
    changing = next((name for name in _CHANGING if spec.arguments.get(name) not in (None, "auto")), None)
    return f"the engine argument '{changing}' changes what vLLM computes" if changing is not None else ""


def _refusals() -> tuple[type[Exception], ...]:
    """Return the exceptions that vLLM raises for an invalid request, model or argument.

    In later versions they are not all subclasses of ValueError.
    """
    try:
        from vllm import exceptions
    except ImportError:
        return (ValueError,)
    names = ("VLLMClientError", "VLLMValidationError")
    return (ValueError, *(getattr(exceptions, name) for name in names if hasattr(exceptions, name)))


def _sentence(error: Exception) -> str:
    """Return the error message as one line, without the parameter and value that vLLM and pydantic append."""
    errors = getattr(error, "errors", None)
    if callable(errors):
        return one_line(ValueError(errors()[0]["msg"].removeprefix("Value error, ")))
    return one_line(ValueError(error.args[0]) if hasattr(error, "parameter") else error)


def _parameter(error: Exception, sampling: SamplingParams) -> str | None:
    """Return the sampling parameter that vLLM refuses; None if it is unknown or not a parameter of requests."""
    name = getattr(error, "parameter", None) or _sentence(error).partition(" ")[0]
    if name in NAMES:
        return str(name)
    # Its errors about structures do not name the parameter.
    return "structured_outputs" if sampling.structured_outputs is not None else None


def _lora_request(name: str, number: int, path: Path) -> Any:
    from vllm.lora.request import LoRARequest

    request: Any = LoRARequest(name, number, str(path))
    return request


def _rewritten(text: str) -> str:
    """Return a JSON schema for which llguidance allows only valid texts. Raises INVALID_ARG for one without any."""
    try:
        rewritten = json.dumps(rewrite(json.loads(text)))
        if UNIQUE in rewritten:
            raise invalid("keyword 'uniqueItems' is not supported for these items by engine 'vllm'")
    except ConchError as error:
        raise invalid(
            f"structured_outputs: this json does not compile: {error.message}", "structured_outputs"
        ) from error
    return rewritten


def _sampling_params(vllm: Any, sampling: SamplingParams, structure: Structure | None, eos_ids: tuple[int, ...]) -> Any:
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    parameters: Any = vllm.SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k or -1,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        stop_token_ids=sorted(sampling.end_ids(eos_ids)),
        # The request's own end token replaces the model's.
        ignore_eos=sampling.ignore_eos or sampling.end_id is not None,
        logit_bias=dict(sampling.logit_bias) or None,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=None
        if structure is None
        else StructuredOutputsParams(
            **{structure.kind: json.loads(structure.text) if structure.kind == "choice" else structure.text}
        ),
    )
    if sampling.bad_words_token_ids:
        # vLLM has no public way to pass token ids; it would tokenise texts itself.
        parameters._bad_words_token_ids = [list(word) for word in sampling.bad_words_token_ids]
    return parameters


def _logprobs(token: int, position: Any, count: int) -> TokenLogprobs:
    """Convert vLLM's dict of a position, which has the most probable tokens and the chosen token."""
    chosen = position[token]
    ranked = sorted((entry.rank, id, entry.logprob) for id, entry in position.items() if entry.rank is not None)
    top = [(int(id), float(value)) for _, id, value in ranked]
    return TokenLogprobs(float(chosen.logprob), int(chosen.rank or 0), top[:count])
