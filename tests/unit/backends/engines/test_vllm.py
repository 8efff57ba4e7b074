"""The engine ``vllm`` against a stand-in for the package: what it is asked for, and what is made of its answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from conch.backends.batching.json_schemas import rewrite
from conch.backends.generation.engine import EngineRequest, EngineSpec, EngineUsage, TokenLogprobs
from conch.backends.generation.generation_backend import open_engine
from conch.backends.generation.service import BROKEN
from conch.checkpoints.gguf import GgufFile
from conch.core.errors import Code, ConchError
from conch.core.sampling.parameters import Feature
from conch.core.sampling.parameters import SamplingParams as Sampling
from conch.core.sampling.structures import Structure
from conch.machine import extras
from tests.unit.checkpoints.gguf_files import LLAMA


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
        Module.engine = made
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


class Module:
    """The engine that was made last."""

    engine: LLMEngine


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: Mapping[str, Mapping[str, Any]] = {
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
    for name, contents in parts.items():
        module = ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")


def spec(**settings: Any) -> EngineSpec:
    return EngineSpec(Path("/models/m"), {}, **{"eos_ids": (99,), **settings})


def run(engine: Any) -> list[tuple[int, list[int], str]]:
    return [(one.id, list(one.tokens), one.finish) for one in engine.step()]


def test_model_is_not_compared_with_arguments_that_change_what_it_computes() -> None:
    engine = open_engine("vllm", spec(arguments={"quantization": "fp8"}))
    assert engine.verify([[5], [50, 51]]) == (
        "not checked: the engine argument 'quantization' changes what vLLM computes"
    )
    assert engine.usage() == EngineUsage()


def test_sequences_are_continued_step_by_step() -> None:
    engine = open_engine("vllm", spec())
    assert (engine.context, engine.max_sequences, engine.vocabulary) == (512, 256, 1000)
    assert (engine.cache_tokens, engine.block_tokens) == (1600, 16)
    assert engine.step() == []
    engine.add(EngineRequest(1, [5], Sampling(max_tokens=2), priority=1))
    engine.add(EngineRequest(2, [97], Sampling(max_tokens=5), priority=2))
    engine.add(EngineRequest(3, [50], Sampling(max_tokens=5), priority=0))
    assert (engine.usage().running, engine.usage().waiting) == (3, 0)
    assert run(engine) == [(3, [51], ""), (1, [6], "")]
    load = engine.usage()
    assert (load.running, load.waiting, load.used_tokens) == (2, 1, 400)
    assert (load.prefix_queries, load.prefix_hits, load.preemptions) == (8, 4, 1)
    engine.cancel(3)
    engine.cancel(3)
    assert Module.engine.aborted == ["3"]
    assert run(engine) == [(1, [7], "length"), (2, [98], "")]
    assert run(engine) == [(2, [99], "stop")]
    assert not engine.busy
    load = engine.usage()
    assert (load.running, load.waiting, load.used_tokens, load.prefix_queries) == (0, 0, 0, 24)
    engine.close()
    assert Module.engine.aborted == ["3", "shutdown"]


def test_parameters_are_passed_on() -> None:
    engine = open_engine("vllm", spec())
    engine.add(
        EngineRequest(
            1,
            [5, 6],
            Sampling(
                max_tokens=7,
                min_tokens=1,
                temperature=0.5,
                top_p=0.9,
                min_p=0.1,
                repetition_penalty=1.1,
                presence_penalty=0.2,
                frequency_penalty=0.3,
                seed=4,
                stop_token_ids=(8,),
                bad_words_token_ids=((1, 2), (3,)),
                logit_bias={4: 1.5},
                prompt_logprobs=1,
                structured_outputs=Structure("choice", '["a", "b"]'),
            ),
        )
    )
    prompt, params, adapter, priority = Module.engine.requests["1"]
    assert prompt == {"prompt_token_ids": [5, 6]}
    assert (adapter, priority) == (None, 0)
    assert params == SamplingParams(
        max_tokens=7,
        min_tokens=1,
        temperature=0.5,
        top_k=-1,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        seed=4,
        stop_token_ids=[8, 99],
        ignore_eos=False,
        logit_bias={4: 1.5},
        logprobs=None,
        prompt_logprobs=1,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=StructuredOutputsParams(choice=["a", "b"]),
        _bad_words_token_ids=[[1, 2], [3]],
    )
    ends = {"end_id": 7}, {"ignore_eos": True}, {"ignore_eos": True, "end_id": 7, "stop_token_ids": (8,)}
    for number, settings in enumerate(ends, 2):
        engine.add(EngineRequest(number, [5], Sampling(**settings)))  # type: ignore[arg-type]
    found = [Module.engine.requests[str(number)][1] for number in (2, 3, 4)]
    assert [(one.stop_token_ids, one.ignore_eos) for one in found] == [([7], True), ([], True), ([8], True)]
    engine.add(EngineRequest(5, [5], Sampling(structured_outputs=Structure("json", "{}"))))
    assert Module.engine.requests["5"][1].structured_outputs == StructuredOutputsParams(json="{}")


def test_llguidance_gets_schemas_for_which_it_allows_only_valid_texts() -> None:
    numbers = Structure("json", '{"anyOf": [{"type": "integer", "x": 1}], "items": [{"type": "null"}]}')
    engine = open_engine("vllm", spec())
    engine.add(EngineRequest(1, [5], Sampling(structured_outputs=numbers)))
    given = Module.engine.requests["1"][1].structured_outputs.json
    assert json.loads(given) == rewrite(json.loads(numbers.text))
    unique = '{"items": {"type": "string"}, "uniqueItems": true}'
    for text, message in (('{"not": {}}', "'not'"), (unique, "'uniqueItems' is not supported for these items")):
        with pytest.raises(ConchError, match=message) as refused:
            engine.add(EngineRequest(2, [5], Sampling(structured_outputs=Structure("json", text))))
        assert refused.value.param == "structured_outputs"
    other = open_engine("vllm", spec(arguments={"structured_outputs_config": {"backend": "xgrammar"}}))
    other.add(EngineRequest(1, [5], Sampling(structured_outputs=numbers)))
    assert Module.engine.requests["1"][1].structured_outputs.json == numbers.text


def test_log_probabilities_and_failures_are_reported() -> None:
    engine = open_engine("vllm", spec())
    engine.add(EngineRequest(1, [5], Sampling(max_tokens=1, logprobs=2)))
    engine.add(EngineRequest(2, [665], Sampling(max_tokens=5)))
    first, second = engine.step()
    assert first.logprobs is not None
    [found] = first.logprobs
    assert (found.logprob, found.rank, found.top) == (-7.0, 7, [(11, -1.0), (12, -2.0)])
    assert second.error is not None
    assert second.error.message == "vLLM ended the request: error"
    assert not engine.busy


def test_log_probabilities_of_the_prompt_come_with_the_first_token() -> None:
    engine = open_engine("vllm", spec())
    engine.add(EngineRequest(1, [5, 6, 7], Sampling(max_tokens=2, prompt_logprobs=1)))
    [first], [second] = engine.step(), engine.step()
    assert first.prompt_logprobs == [TokenLogprobs(-7.0, 7, [(9, -0.5)])] * 2
    assert second.prompt_logprobs is None


def test_structure_that_vllm_cannot_compile_is_an_invalid_argument() -> None:
    engine = open_engine("vllm", spec())
    engine.add(EngineRequest(1, [665], Sampling(structured_outputs=Structure("json", "{}"))))
    engine.add(EngineRequest(2, [664], Sampling(structured_outputs=Structure("json", "{}"))))
    refused, _ = engine.step()
    assert refused.error is not None
    assert (refused.error.code, refused.error.message) == (Code.INVALID_ARG, "vLLM cannot compile this json")
    assert refused.error.param == "structured_outputs"
    [failed] = engine.step()
    assert failed.error is not None
    assert failed.error.code is Code.INTERNAL


def test_what_vllm_refuses_is_refused_in_one_sentence() -> None:
    engine = open_engine("vllm", spec())
    with pytest.raises(ConchError, match=r"^temperature must be in \[0, 2\], got 3$") as refused:
        engine.add(EngineRequest(1, [5], Sampling(temperature=3)))
    assert (refused.value.code, refused.value.param) == (Code.INVALID_ARG, "temperature")
    with pytest.raises(ConchError, match=r"^top_p must be in \(0, 1\]$") as refused:
        engine.add(EngineRequest(2, [5], Sampling(top_p=2)))
    assert (refused.value.code, refused.value.param) == (Code.INVALID_ARG, "top_p")
    with pytest.raises(ConchError, match=r"^The decoder prompt \(length 101\) is longer than the maximum$"):
        engine.add(EngineRequest(1, [5] * 101, Sampling()))
    assert not engine.busy

    for settings, code, message in (
        ({"arguments": {"no_such": 1}}, Code.INVALID_ARG, "'no_such' is not an engine argument of vLLM"),
        (
            {"arguments": {"swap_spaces": 1}},
            Code.INVALID_ARG,
            "'swap_spaces' is not an engine argument of vLLM; did you mean 'swap_space'?",
        ),
        (
            {"arguments": {"rope_scaling": {"type": "linear"}}},
            Code.INVALID_ARG,
            "vllm no longer has the engine argument 'rope_scaling'; its successor is 'hf_overrides': without it, the "
            "results would be different",
        ),
        ({"dtype": "float64"}, Code.INVALID_ARG, "engine 'vllm' cannot load '/models/m': Unknown dtype: float64"),
        (
            {"arguments": {"tensor_parallel_size": 7}},
            Code.INVALID_ARG,
            "engine 'vllm' cannot load '/models/m': Total number of attention heads (9) must be divisible by tensor "
            "parallel size (7)",
        ),
        (
            {"arguments": {"gpu_memory_utilization": 2.0}},
            Code.INTERNAL,
            "engine 'vllm' failed to load '/models/m': Engine core initialization failed",
        ),
    ):
        with pytest.raises(ConchError) as refused:
            open_engine("vllm", spec(**settings))
        assert (refused.value.code, refused.value.message) == (code, message)


def test_the_configuration_becomes_engine_arguments(tmp_path: Path) -> None:
    adapters = {}
    for name, rank in (("a", 4), ("b", 20)):
        adapters[name] = tmp_path / name
        adapters[name].mkdir()
        (adapters[name] / "adapter_config.json").write_text(json.dumps({"r": rank}))
    engine = open_engine(
        "vllm",
        spec(
            dtype="bfloat16",
            context=256,
            max_sequences=8,
            max_batched_tokens=1024,
            cache_tokens=1000,
            prefix_caching=False,
            adapters=adapters,
            speculative="draft_model",
            draft=Path("/models/d"),
            draft_tokens=3,
            arguments={"gpu_memory_utilization": 0.5, "max_num_seqs": 4, "disable_log_stats": True, "task": "generate"},
        ),
    )
    assert Module.engine.arguments == EngineArgs(
        model="/models/m",
        tokenizer="/models/m",
        dtype="bfloat16",
        enable_prefix_caching=False,
        scheduling_policy="priority",
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=1024,
        num_gpu_blocks_override=63,
        enable_lora=True,
        max_loras=2,
        max_lora_rank=32,
        speculative_config={"model": "/models/d", "num_speculative_tokens": 3},
        gpu_memory_utilization=0.5,
        structured_outputs_config=StructuredOutputsConfig("guidance"),
    )
    assert engine.warnings == [
        "vllm no longer has the engine argument 'task'; its successor is 'runner': it is ignored"
    ]
    assert (engine.adapters, engine.precision) == (("a", "b"), "bfloat16")
    assert engine.features == frozenset(Feature) - {Feature.BEAMS}
    engine.add(EngineRequest(1, [5], Sampling(lora_name="b")))
    assert Module.engine.requests["1"][2] == LoRARequest("b", 2, str(adapters["b"]))
    with pytest.raises(ConchError, match="is no LoRA adapter"):
        open_engine("vllm", spec(adapters={"c": tmp_path}))


def test_one_library_reads_all_structures() -> None:
    for given, chosen in (
        ({}, StructuredOutputsConfig("guidance")),
        ({"disable_any_whitespace": True}, StructuredOutputsConfig("guidance", disable_any_whitespace=True)),
        ({"backend": "xgrammar"}, StructuredOutputsConfig("xgrammar")),
    ):
        open_engine("vllm", spec(arguments={"structured_outputs_config": given}))
        assert Module.engine.arguments.structured_outputs_config == chosen
    open_engine("vllm", spec())
    assert Module.engine.arguments.structured_outputs_config == StructuredOutputsConfig("guidance")


def test_dead_vllm_process_ends_an_idle_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    exits: list[int] = []
    monkeypatch.setattr("os._exit", exits.append)
    open_engine("vllm", spec(arguments={"tensor_parallel_size": 2}))
    [died] = Module.engine.callbacks
    died()
    assert exits == [BROKEN]


def test_a_gguf_file_is_named_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    open_engine("vllm", EngineSpec(tmp_path, {}, (), gguf=GgufFile(tmp_path / "m.gguf", 3, {}, {})))
    arguments = Module.engine.arguments
    assert (arguments.model, arguments.tokenizer) == (str(tmp_path / "m.gguf"), str(tmp_path))
    assert arguments.hf_config_path == str(tmp_path)


def test_gguf_file_that_vllm_does_not_read_is_refused_with_other_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["vllm.model_executor.layers.quantization"], "QUANTIZATION_METHODS", ["awq"])
    with pytest.raises(
        ConchError, match="vllm reads no GGUF files without a plugin; set parameter 'engine' to"
    ) as refused:
        open_engine("vllm", EngineSpec(Path("/models"), {}, (), gguf=GgufFile(Path("/models/m.gguf"), 3, LLAMA, {})))
    assert refused.value.code is Code.INVALID_ARG


def test_code_for_log_probabilities_is_compiled_at_load_and_leaves_no_trace() -> None:
    engine = open_engine("vllm", spec())
    assert Module.engine.made == {"0": 1}
    assert Module.engine.forgotten
    assert not engine.busy
    assert engine.usage() == EngineUsage()


def test_one_gpu_is_shown_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    open_engine("vllm", spec(device="cuda", device_id=1, arguments={"tensor_parallel_size": 2}))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,5"
    with pytest.raises(ConchError, match=r"^there is no GPU 2: CUDA_VISIBLE_DEVICES is '3,5'$"):
        open_engine("vllm", spec(device="cuda", device_id=2))
    open_engine("vllm", spec(device="cuda", device_id=1))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    open_engine("vllm", spec(device="cuda", device_id=2))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2"


def test_without_the_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConchError) as refused:
        open_engine("vllm", spec())
    assert refused.value.code is Code.UNSUPPORTED
    assert refused.value.message == f"engine 'vllm' needs vllm: {extras.command('vllm')}"
