"""Other tasks of ``transformers.pipeline``: their answers as text or JSON, and arguments that clients may not give."""

from __future__ import annotations

import json
from base64 import b64decode
from io import BytesIO
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import transformers
from PIL import Image

from conch.backends.base.arrays import Result
from conch.backends.tasks.huggingface_backend import describe_task
from conch.backends.tasks.pipeline import arguments, inputs_of
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.core.errors import Code, ConchError
from tests import task_checkpoints
from tests.task_checkpoints import RATE, image_file, sound_file, tone
from tests.task_requests import answers, ask, open_task, texts

PROMPT = "I am going to"


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return task_checkpoints.causal(tmp_path_factory.mktemp("causal"))


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return task_checkpoints.clip(tmp_path_factory.mktemp("clip"))


def pipeline(task: str, folder: Path) -> Any:
    make: Any = transformers.pipeline
    return make(task, model=str(folder), device="cpu", dtype=torch.float32)


def opened(file: bytes) -> Any:
    return Image.open(BytesIO(file)).convert("RGB")


def close(found: Any, wanted: Any) -> bool:
    """Whether JSON is what a pipeline gave, up to rounding."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(close(found[name], wanted[name]) for name in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(close(*pair) for pair in zip(found, wanted, strict=True))
    return bool(found == (pytest.approx(wanted, rel=1e-4, abs=1e-6) if isinstance(wanted, float) else wanted))


def test_text_generation_gives_the_text(causal: Path) -> None:
    wanted = pipeline("text-generation", causal)(PROMPT, max_new_tokens=8)[0]["generated_text"]
    task = open_task(causal)
    assert texts(task, ask({"text_input": [PROMPT]}, options='{"max_new_tokens": 8}')) == [[wanted]]
    assert wanted.startswith(PROMPT)


def test_each_row_has_its_options(causal: Path) -> None:
    reference = pipeline("text-generation", causal)
    rows = ['{"max_new_tokens": 3}', '{"max_new_tokens": 6, "return_full_text": false}']
    task = open_task(causal)
    assert texts(task, ask({"text_input": [PROMPT, PROMPT], "options": rows})) == [
        [
            reference(PROMPT, max_new_tokens=3)[0]["generated_text"],
            reference(PROMPT, max_new_tokens=6, return_full_text=False)[0]["generated_text"],
        ]
    ]


def test_several_texts_are_json(causal: Path) -> None:
    options = '{"max_new_tokens": 3, "num_beams": 2, "num_return_sequences": 2}'
    ((found,),) = texts(open_task(causal), ask({"text_input": [PROMPT]}, options=options))
    wanted = pipeline("text-generation", causal)(PROMPT, max_new_tokens=3, num_beams=2, num_return_sequences=2)
    assert json.loads(found) == wanted


def test_sound_is_classified(tmp_path: Path) -> None:
    folder = task_checkpoints.sounds(tmp_path)
    samples = tone(0.5)
    task = open_task(folder)
    wanted = pipeline("audio-classification", folder)(samples)
    for request in (ask({"audio": [sound_file(samples, subtype="FLOAT")]}), ask({"samples": samples[None]})):
        assert close(json.loads(texts(task, request)[0][0]), wanted)


def test_objects_are_found(tmp_path: Path) -> None:
    folder = task_checkpoints.detector(tmp_path)
    file = image_file(48, 40)
    wanted = pipeline("object-detection", folder)(opened(file), threshold=0.0)
    ((found,),) = texts(open_task(folder), ask({"image": [file]}, options='{"threshold": 0}'))
    assert wanted
    assert close(json.loads(found), wanted)


def test_images_are_compared_with_labels(clip: Path) -> None:
    file = image_file()
    labels = ["a station", "a bus"]
    wanted = pipeline("zero-shot-image-classification", clip)(opened(file), candidate_labels=labels)
    task = open_task(clip, task="zero-shot-image-classification")
    ((found,),) = texts(task, ask({"image": [file], "candidate_labels": [labels]}))
    assert close(json.loads(found), wanted)


def test_image_in_an_answer_is_a_png_file(tmp_path: Path) -> None:
    folder = task_checkpoints.depth(tmp_path)
    file = image_file(32, 32)
    ((found,),) = texts(open_task(folder), ask({"image": [file]}))
    answer = json.loads(found)
    wanted = pipeline("depth-estimation", folder)(opened(file))
    np.testing.assert_array_equal(np.asarray(opened_any(answer["depth"])), np.asarray(wanted["depth"]))
    np.testing.assert_allclose(answer["predicted_depth"], wanted["predicted_depth"].numpy(), rtol=1e-4, atol=1e-6)


def opened_any(text: str) -> Any:
    return Image.open(BytesIO(b64decode(text)))


def test_sound_in_an_answer_is_a_wav_file(tmp_path: Path) -> None:
    folder = task_checkpoints.speaker(tmp_path)
    ((found,),) = texts(open_task(folder, task="text-to-audio"), ask({"text_input": ["hello there"]}))
    answer = json.loads(found)
    samples, rate = soundfile.read(BytesIO(b64decode(answer["audio"])))
    assert rate == answer["sampling_rate"] == 8000
    assert len(samples)


def test_features_of_an_image_are_lists(tmp_path: Path) -> None:
    folder = task_checkpoints.vit(tmp_path, head="ViTModel")
    task = open_task(folder, task="image-feature-extraction")
    ((found,),) = texts(task, ask({"image": [image_file()]}))
    assert np.array(json.loads(found)).shape == (1, 17, 32)


OWN_PIPELINE = """
from transformers import Pipeline

class Shout(Pipeline):
    _load_tokenizer = True

    def _sanitize_parameters(self, mark=None, **kwargs):
        return {}, {}, {} if mark is None else {"mark": mark}

    def preprocess(self, text):
        return {"text": text}

    def _forward(self, inputs):
        return inputs

    def postprocess(self, inputs, mark="!"):
        return {"text": inputs["text"].upper() + mark, "length": len(inputs["text"])}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint that brings a pipeline of its own."""
    folder = task_checkpoints.causal(tmp_path / "model")
    (folder / "shouting.py").write_text(OWN_PIPELINE)
    config = json.loads((folder / "config.json").read_text())
    config["custom_pipelines"] = {
        "shouting": {"impl": "shouting.Shout", "pt": ["AutoModelForCausalLM"], "type": "text"}
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_pipeline_of_the_checkpoint_runs_when_its_code_is_trusted(own: Path) -> None:
    task = open_task(own, task="shouting", trust_remote_code=True)
    assert texts(task, ask({"text_input": ["hello"]}, options='{"mark": "?"}')) == [["HELLO?"]]


def test_pipeline_of_the_checkpoint_is_refused_when_its_code_is_not_trusted(own: Path) -> None:
    with pytest.raises(ConchError, match="trust_remote_code") as caught:
        open_task(own, task="shouting")
    assert caught.value.code is Code.INVALID_ARG


def test_task_that_transformers_does_not_have_is_refused_by_name(causal: Path) -> None:
    checkpoint = Checkpoint.open(causal, Options(task="mind-reading"))
    with pytest.raises(ConchError, match=r"task 'mind-reading' is not known; the tasks .* are: .*object-detection, "):
        describe_task(checkpoint)


@pytest.mark.parametrize(
    "options",
    [
        '{"custom_generate": "someone/model", "trust_remote_code": true}',
        '{"assistant_model": "someone/model"}',
        '{"tokenizer_encode_kwargs": {}}',
        '{"generate_kwargs": {"custom_generate": "someone/model"}}',
        '{"return_tensors": true}',
        '{"batch_size": 1000}',
        '{"images": "http://example.com/a.png"}',
        '{"max_new_token": 3}',
        '{"cache_implementation": "static"}',
    ],
)
def test_arguments_that_are_not_for_clients_are_refused(causal: Path, options: str) -> None:
    with pytest.raises(ConchError, match="of input 'options' is not allowed") as caught:
        open_task(causal).prepare(ask({"text_input": [PROMPT]}, options=options))
    assert caught.value.code is Code.INVALID_ARG


@pytest.mark.parametrize(
    ("options", "greatest"),
    [
        ('{"max_new_tokens": 1000000000}', 65536),
        ('{"num_beams": 33}', 32),
        ('{"generate_kwargs": {"num_return_sequences": 1e9}}', 64),
        ('{"top_k": 1e400}', 1 << 20),
        ('{"temperature": NaN}', 1 << 20),
    ],
)
def test_numbers_that_ask_for_more_than_a_request_can_mean_are_refused(
    causal: Path, options: str, greatest: int
) -> None:
    with pytest.raises(ConchError, match=f"of input 'options' is .*; it must be at most {greatest}") as caught:
        open_task(causal).prepare(ask({"text_input": [PROMPT]}, options=options))
    assert caught.value.code is Code.INVALID_ARG


def test_words_of_a_command_line_are_not_for_clients() -> None:
    """Text is found in documents by a program that is started."""

    class Documents:
        def _sanitize_parameters(self, lang=None, tesseract_config=None, max_answer_len=None):  # type: ignore[no-untyped-def]
            raise AssertionError

    for name in ("lang", "tesseract_config"):
        with pytest.raises(ConchError, match=f"argument '{name}' of input 'options' is not allowed"):
            arguments(Documents(), "document-question-answering", json.dumps({name: "-c debug_file=/tmp/x"}), 0)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{:>300000000}", "it must have one placeholder for the label"),
        ("{}{0:>300000000}", "it must have no other braces"),
        ("{:>300000000}{}", "it must have no other braces"),
        ("{} of {{", "it must have no other braces"),
        ("none", "it must have one placeholder for the label"),
        (7, "it must have one placeholder for the label"),
        ("{}" + "x" * 1000, "at most 1000 characters"),
    ],
)
def test_hypothesis_template_is_no_format(clip: Path, template: Any, message: str) -> None:
    task = open_task(clip, task="zero-shot-image-classification")
    request = ask(
        {"image": [image_file()], "candidate_labels": [["a", "b"]]},
        options=json.dumps({"hypothesis_template": template}),
    )
    with pytest.raises(ConchError, match=message) as caught:
        task.prepare(request)
    assert caught.value.code is Code.INVALID_ARG


def test_labels_of_a_row_are_limited_by_a_parameter(clip: Path) -> None:
    task = open_task(clip, task="zero-shot-image-classification", max_candidate_labels=2)
    with pytest.raises(
        ConchError, match=r"has 3 labels in a row; at most 2 are allowed \(parameter 'max_candidate_labels'"
    ):
        task.prepare(ask({"image": [image_file()], "candidate_labels": [["a", "b", "c"]]}))


@pytest.mark.parametrize("options", ["[1]", "{", "7", "[" * 50_000, '"' + "x" * 70_000 + '"'])
def test_options_that_are_no_object_are_refused(causal: Path, options: str) -> None:
    with pytest.raises(ConchError, match="input 'options' in row 0"):
        open_task(causal).prepare(ask({"text_input": [PROMPT]}, options=options))


def test_argument_of_a_wrong_type_fails_its_request_only(causal: Path) -> None:
    bad = ask({"text_input": [PROMPT]}, options='{"max_new_tokens": "many"}')
    good = ask({"text_input": [PROMPT]}, options='{"max_new_tokens": 2}')
    failed, answered = answers(open_task(causal), bad, good)
    assert isinstance(failed, ConchError)
    assert failed.code is Code.INVALID_ARG
    assert isinstance(answered, Result)


def test_cancelled_request_does_not_run(causal: Path) -> None:
    task = open_task(causal)
    request = ask({"text_input": [PROMPT]})
    prepared = task.prepare(request)
    request.cancelled = True
    (answer,) = answers_of(task, prepared)
    assert isinstance(answer, ConchError)
    assert answer.code is Code.CANCELLED


def answers_of(task: Any, *prepared: Any) -> list[Any]:
    from conch.backends.tasks.task import ExecutionWork

    return list(task.execute(prepared, ExecutionWork()))


@pytest.mark.parametrize("inputs", [{"image": [b"nothing"]}, {"image": [b"http://example.com/a.png"]}])
def test_images_are_never_fetched(clip: Path, inputs: dict[str, Any]) -> None:
    task = open_task(clip, task="zero-shot-image-classification")
    with pytest.raises(ConchError, match="input 'image' in row 0 cannot be read"):
        task.prepare(ask({**inputs, "candidate_labels": [["a", "b"]]}))


def test_sound_is_needed_by_tasks_that_hear(tmp_path: Path) -> None:
    task = open_task(task_checkpoints.sounds(tmp_path))
    with pytest.raises(ConchError, match="one of the inputs 'audio' and 'samples'"):
        task.prepare(ask({"sampling_rate": np.full((1, 1), RATE, np.int32)}))


def test_threads_have_tokenizers_of_their_own_over_the_same_weights(causal: Path) -> None:
    task = open_task(causal)
    request = ask({"text_input": [PROMPT]}, options='{"max_new_tokens": 4}')
    wanted = texts(task, request)
    found: list[Any] = []
    threads = [Thread(target=lambda: found.append(texts(task, request))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted] * 3


def test_signature_is_known_without_weights(clip: Path, own: Path) -> None:
    described = describe_task(Checkpoint.open(clip, Options(task="zero-shot-image-classification")))
    assert [spec.name for spec in described.inputs] == ["image", "candidate_labels", "options"]
    assert [spec.name for spec in described.outputs] == ["text_output"]
    assert [spec.name for spec in inputs_of("shouting", json.loads((own / "config.json").read_text()))] == [
        "text_input", "options",
    ]  # fmt: skip
