"""A stand-in for the package vllm: an engine that counts upwards, and the classes of its arguments and requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any, Final


@dataclass
class StructuredOutputsConfig:
    backend: str = "auto"
    disable_any_whitespace: bool = False


class ConfigError(ValueError):
    """As pydantic's ``ValidationError``."""

    def errors(self) -> list[dict[str, str]]:
        return [{"msg": f"Value error, {self.args[0]}"}]

    def __str__(self) -> str:
        return (
            f"1 validation error for VllmConfig Value error, {self.args[0]} [type=value_error, input_type=ArgsKwargs]"
        )


@dataclass
class EngineArgs:
    model: str = "model"
    tokenizer: str | None = None
    hf_config_path: str | None = None
    dtype: str = "auto"
    trust_remote_code: bool = False
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    num_gpu_blocks_override: int | None = None
    block_size: int | None = None
    quantization: str | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    speculative_config: dict[str, Any] | None = None
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    structured_outputs_config: StructuredOutputsConfig | None = None
    disable_log_stats: bool = False


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1


@dataclass
class StructuredOutputsParams:
    json: str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None


@dataclass
class SamplingParams:
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop_token_ids: list[int]
    ignore_eos: bool
    logit_bias: dict[int, float] | None
    logprobs: int | None
    prompt_logprobs: int | None
    detokenize: bool
    output_kind: RequestOutputKind
    structured_outputs: StructuredOutputsParams | None
    _bad_words_token_ids: list[list[int]] | None = None

    def __post_init__(self) -> None:
        if self.top_p > 1:
            raise VLLMValidationError("top_p must be in (0, 1]", parameter="top_p", value=self.top_p)
        if self.temperature > 2:
            raise ValueError(f"temperature must be in [0, 2], got {self.temperature}.")


class VLLMValidationError(Exception):
    """As in later versions of vLLM, where it is no ValueError."""

    def __init__(self, message: str, *, parameter: str, value: Any) -> None:
        super().__init__(message)
        self.parameter, self.value = parameter, value

    def __str__(self) -> str:
        return f"{self.args[0]} (parameter={self.parameter}, value={self.value})"


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str


#: All engines since the test began.
engines: Final[list[LLMEngine]] = []


@dataclass
class LLMEngine:
    """Counts upwards from the last token of a prompt, two sequences at a time, the lowest priority first."""

    arguments: EngineArgs
    loggers: list[Any]
    requests: dict[str, tuple[Any, Any, Any, int]] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    callbacks: list[Callable[[], object]] = field(default_factory=list)

    @classmethod
    def from_engine_args(cls, arguments: EngineArgs, stat_loggers: list[Any]) -> LLMEngine:
        if arguments.dtype == "float64":
            raise ValueError("Unknown dtype: float64\n\nsee the documentation")
        if arguments.tensor_parallel_size == 7:
            raise ConfigError("Total number of attention heads (9) must be divisible by tensor parallel size (7).")
        if arguments.gpu_memory_utilization > 1:
            raise RuntimeError("Engine core initialization failed.")
        made = cls(arguments, [make(SimpleNamespace(), 0) for make in stat_loggers])
        made.vllm_config = SimpleNamespace(  # type: ignore[attr-defined]
            model_config=SimpleNamespace(
                max_model_len=arguments.max_model_len or 512, get_vocab_size=lambda: 1000, dtype="torch.bfloat16"
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=arguments.max_num_seqs or 256),
            cache_config=SimpleNamespace(block_size=16, num_gpu_blocks=arguments.num_gpu_blocks_override or 100),
        )
        made.model_executor = SimpleNamespace(register_failure_callback=made.callbacks.append)  # type: ignore[attr-defined]
        made.engine_core = SimpleNamespace(shutdown=lambda: made.aborted.append("shutdown"))  # type: ignore[attr-defined]
        engines.append(made)
        return made

    def add_request(self, request_id: str, prompt: Any, params: Any, *, lora_request: Any, priority: int) -> None:
        if len(prompt["prompt_token_ids"]) > 100:
            raise ValueError("The decoder prompt (length 101) is longer than the maximum. Make it shorter.")
        self.requests[request_id] = (prompt, params, lora_request, priority)

    def reset_prefix_cache(self) -> None:
        self.forgotten = True

    def abort_request(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.aborted.append(request_id)
            self.requests.pop(request_id, None)

    def step(self) -> list[Any]:
        running = sorted(self.requests.items(), key=lambda one: one[1][3])[:2]
        outputs = []
        for request_id, (prompt, params, _, _) in running:
            count = self.made[request_id] = self.made.get(request_id, 0) + 1
            token = prompt["prompt_token_ids"][-1] + count
            reason = "stop" if token in params.stop_token_ids else "length" if count == params.max_tokens else None
            if token == 666:
                reason = "error"
            tokens = [] if token == 666 else [token]
            found = None
            if params.logprobs is not None:
                likely = {10 + rank: SimpleNamespace(rank=rank, logprob=-float(rank)) for rank in range(1, 4)}
                found = [{token: SimpleNamespace(rank=7, logprob=-7.0), **likely}]
            made = SimpleNamespace(token_ids=tokens, finish_reason=reason, logprobs=found)
            ids = prompt["prompt_token_ids"]
            scored = None
            if params.prompt_logprobs is not None and count == 1:
                entries = ({id: SimpleNamespace(rank=7, logprob=-7.0), 9: SimpleNamespace(rank=1, logprob=-0.5)}
                           for id in ids[1:])  # fmt: skip
                scored = [None, *entries]
            output = SimpleNamespace(
                request_id=request_id, outputs=[made], finished=reason is not None, prompt_token_ids=ids,
                prompt_logprobs=scored,
            )  # fmt: skip
            outputs.append(output)
            if reason is not None:
                del self.requests[request_id]
        for logger in self.loggers:
            logger.record(
                scheduler_stats=SimpleNamespace(
                    num_running_reqs=len(running),
                    kv_cache_usage=0.25,
                    prefix_cache_stats=SimpleNamespace(queries=8, hits=4),
                ),
                iteration_stats=SimpleNamespace(num_preempted_reqs=1),
                mm_cache_stats=None,
                engine_idx=0,
            )
            logger.log()
        return outputs


#: The modules of the package, with their contents.
MODULES: Final[Mapping[str, Mapping[str, Any]]] = {
    "vllm": {"EngineArgs": EngineArgs, "LLMEngine": LLMEngine, "SamplingParams": SamplingParams},
    "vllm.config": {"StructuredOutputsConfig": StructuredOutputsConfig},
    "vllm.exceptions": {"VLLMValidationError": VLLMValidationError},
    "vllm.lora": {},
    "vllm.model_executor.layers.quantization": {"QUANTIZATION_METHODS": ["awq", "gguf"]},
    "vllm.plugins": {"load_general_plugins": lambda: None},
    "vllm.lora.request": {"LoRARequest": LoRARequest},
    "vllm.sampling_params": {
        "RequestOutputKind": RequestOutputKind,
        "StructuredOutputsParams": StructuredOutputsParams,
    },
}
