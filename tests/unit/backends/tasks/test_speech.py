"""Speech recognition: the pipeline's own answers, for files and samples, short and long, alone and in batches."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from conch.backends.base.arrays import Result
from conch.backends.graphs.openvino import CompiledGraph
from conch.backends.tasks.task import ExecutionWork, Task
from conch.convert.run import convert
from conch.core.errors import Code, ConchError
from tests import task_checkpoints
from tests.convert_checkpoints import no_progress, quick_plan, spoken
from tests.task_checkpoints import RATE, WINDOW, sound_file, tone
from tests.task_requests import answers, ask, open_task, previewed, texts

SHORT, OTHER, LONG = tone(1.2), tone(1.7, seed=3), tone(5.3, seed=1)


@pytest.fixture(scope="module")
def whisper_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return task_checkpoints.whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module", params=["torch", "openvino"])
def whisper(whisper_folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Task:
    """Whisper in PyTorch, and converted: both are compared with the pipeline in PyTorch."""
    if request.param == "torch":
        return open_task(whisper_folder)
    models = tmp_path_factory.mktemp("models")
    data = spoken(tmp_path_factory.mktemp("data"))
    convert(quick_plan(whisper_folder, models, data=data, batch_sizes=(1,), quantize=("none",)), no_progress)
    return open_task(models / "m" / "1", variant="openvino-fp32")


@pytest.fixture(scope="module")
def whisper_pipeline(whisper_folder: Path) -> Any:
    return pipeline(whisper_folder)


@pytest.fixture(scope="module")
def ctc_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return task_checkpoints.ctc(tmp_path_factory.mktemp("ctc"))


@pytest.fixture(scope="module")
def ctc(ctc_folder: Path) -> Task:
    return open_task(ctc_folder)


def pipeline(folder: Path) -> Any:
    make: Any = transformers.pipeline
    return make("automatic-speech-recognition", model=str(folder), device="cpu", dtype=torch.float32)


def raw(samples: Any) -> dict[str, Any]:
    return {"raw": samples, "sampling_rate": RATE}


def pieces(given: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
    """The pipeline's chunks as the task gives them."""
    return [
        {"text": chunk["text"], "start": round(chunk["timestamp"][0] or 0, 3),
         "end": round(seconds if chunk["timestamp"][1] is None else chunk["timestamp"][1], 3)}
        for chunk in given["chunks"]
    ]  # fmt: skip


def test_samples_are_transcribed_as_by_the_pipeline(whisper: Task, whisper_pipeline: Any) -> None:
    assert texts(whisper, ask({"samples": SHORT[None]})) == [[whisper_pipeline(raw(SHORT))["text"]]]


@pytest.mark.parametrize(("format", "subtype"), [("WAV", "FLOAT"), ("FLAC", "PCM_24"), ("OGG", "VORBIS")])
def test_files_are_transcribed(whisper: Task, whisper_pipeline: Any, format: str, subtype: str) -> None:
    file = sound_file(SHORT, format=format, subtype=subtype)
    ((written,),) = texts(whisper, ask({"audio": [file]}))
    if format != "OGG":
        assert written == whisper_pipeline(raw(SHORT))["text"]
    assert written


def test_short_recordings_run_as_one_batch(whisper: Task, whisper_pipeline: Any) -> None:
    usage = ExecutionWork()
    requests = [ask({"samples": SHORT[None]}), ask({"samples": OTHER[None]})]
    results = whisper.execute([whisper.prepare(request) for request in requests], usage)
    found = [result.outputs["text_output"].elements[0] for result in results if isinstance(result, Result)]  # type: ignore[union-attr]
    assert usage.runs == 1
    assert found == [whisper_pipeline(raw(samples))["text"] for samples in (SHORT, OTHER)]


def test_long_recording_is_transcribed_window_by_window(whisper: Task, whisper_pipeline: Any) -> None:
    wanted = whisper_pipeline(raw(LONG), return_timestamps=True)
    request = ask({"samples": LONG[None]})
    assert texts(whisper, request) == [[wanted["text"]]]
    assert texts(whisper, request, output="chunks") == [["[]"]]


def test_long_recording_in_overlapping_chunks_by_configuration(whisper_folder: Path, whisper_pipeline: Any) -> None:
    task = open_task(whisper_folder, chunk_length_s=2)
    wanted = whisper_pipeline(raw(LONG), chunk_length_s=2.0)
    usage = ExecutionWork()
    (result,) = task.execute([task.prepare(ask({"samples": LONG[None]}))], usage)
    assert isinstance(result, Result)
    assert result.outputs["text_output"].elements == [wanted["text"]]  # type: ignore[union-attr]
    assert usage.sequences > usage.runs


@pytest.mark.parametrize("samples", [SHORT, LONG], ids=["short", "long"])
def test_segments_have_times(whisper: Task, whisper_pipeline: Any, samples: Any) -> None:
    wanted = pieces(whisper_pipeline(raw(samples), return_timestamps=True), len(samples) / RATE)
    ((found,),) = texts(whisper, ask({"samples": samples[None]}, return_timestamps="segment"), output="chunks")
    assert json.loads(found) == wanted


def test_words_have_times_and_leave_other_requests_alone(
    whisper: Task, whisper_pipeline: Any, whisper_folder: Path
) -> None:
    plain = ask({"samples": OTHER[None]})
    before = texts(whisper, plain)
    ((found,),) = texts(whisper, ask({"samples": SHORT[None]}, return_timestamps="word"), output="chunks")
    wanted = pieces(pipeline(whisper_folder)(raw(SHORT), return_timestamps="word"), len(SHORT) / RATE)
    assert json.loads(found) == wanted
    assert texts(whisper, plain) == before


def test_language_and_task_are_those_of_the_request(whisper: Task, whisper_pipeline: Any) -> None:
    for chosen in ({"language": "de"}, {"language": "german", "task": "translate"}):
        wanted = whisper_pipeline(raw(SHORT), generate_kwargs=chosen)["text"]
        assert texts(whisper, ask({"samples": SHORT[None]}, **chosen)) == [[wanted]]


def test_each_recording_of_a_batch_has_its_language_and_duration(whisper: Task, whisper_pipeline: Any) -> None:
    chosen = [ask({"samples": SHORT[None]}, return_language=True, language="de"), ask({"samples": OTHER[None]})]
    chosen += [ask({"samples": samples[None]}, return_language=True) for samples in (OTHER, LONG)]
    results = whisper.execute([whisper.prepare(request) for request in chosen], ExecutionWork())
    outputs = [result.outputs for result in results if isinstance(result, Result)]
    detected = [
        whisper_pipeline(raw(samples), return_timestamps=True, return_language=True)["chunks"][0]["language"]
        for samples in (OTHER, LONG)
    ]
    assert [output["language"].elements for output in outputs] == [["german"], [""], *([name] for name in detected)]  # type: ignore[union-attr]
    assert [output["duration"].item() for output in outputs] == pytest.approx([1.2, 1.7, 1.7, 5.3])  # type: ignore[union-attr]


def test_language_of_the_response_leaves_the_times_of_words(whisper: Task) -> None:
    plain, named = (
        texts(whisper, ask({"samples": SHORT[None]}, return_timestamps="word", **chosen), output="chunks")
        for chosen in ({}, {"return_language": True})
    )
    assert plain == named != [["[]"]]


def test_end_of_a_long_prompt_is_used(whisper: Task, whisper_pipeline: Any) -> None:
    ids = whisper_pipeline.tokenizer.get_prompt_ids("the library " * 30, return_tensors="pt")
    wanted = whisper_pipeline(raw(SHORT), generate_kwargs={"prompt_ids": torch.cat([ids[:1], ids[1:][-19:]])})["text"]
    assert len(ids) > 40
    assert texts(whisper, ask({"samples": SHORT[None]}, prompt="the library " * 30)) == [[wanted]]


def test_unknown_language_fails_its_request_only(whisper: Task) -> None:
    failed, answered = answers(
        whisper, ask({"samples": SHORT[None]}, language="klingon"), ask({"samples": SHORT[None]})
    )
    assert isinstance(failed, ConchError)
    assert failed.code is Code.INVALID_ARG
    assert "klingon" in failed.message
    assert isinstance(answered, Result)


def test_sampling_rate_and_stereo_are_brought_to_what_the_model_hears(ctc: Task) -> None:
    wanted = texts(ctc, ask({"samples": SHORT[None]}))
    doubled = tone(1.2, 2 * RATE)
    near = ctc.prepare(ask({"samples": doubled[None]}, sampling_rate=2 * RATE))
    assert near.length == ctc.prepare(ask({"samples": SHORT[None]})).length
    assert texts(ctc, ask({"audio": [sound_file(np.stack([SHORT, SHORT], 1), subtype="FLOAT")]})) == wanted


def test_ctc_transcribes_as_the_pipeline(ctc: Task, ctc_folder: Path) -> None:
    wanted = pipeline(ctc_folder)(raw(SHORT), return_timestamps="word")
    request = ask({"audio": [sound_file(SHORT, subtype="FLOAT")]}, return_timestamps="word")
    assert texts(ctc, request) == [[wanted["text"]]]
    ((found,),) = texts(ctc, request, output="chunks")
    assert json.loads(found) == pieces(wanted, 1.2)


def test_ctc_joins_overlapping_chunks_in_order(ctc_folder: Path) -> None:
    task = open_task(ctc_folder, chunk_length_s=2)
    first, second = texts(task, ask({"samples": LONG[None]}), ask({"samples": OTHER[None]}))
    reference = pipeline(ctc_folder)
    assert first == [reference(raw(LONG), chunk_length_s=2.0)["text"]]
    assert second == [reference(raw(OTHER), chunk_length_s=2.0)["text"]]


def test_rows_of_a_request_keep_their_order(ctc: Task) -> None:
    files = [sound_file(samples) for samples in (LONG, SHORT, OTHER)]
    together = texts(ctc, ask({"audio": files}))
    assert together == [[texts(ctc, ask({"audio": [file]}))[0][0] for file in files]]


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ({"audio": [b"RIFF1234"], "samples": SHORT[None]}, {}, "exactly one of"),
        ({"audio": [sound_file(SHORT), b"RIFFnothing"]}, {}, "input 'audio' in row 1 cannot be read"),
        ({"audio": [b"/etc/passwd"]}, {}, "it is text, but not base64"),
        ({"audio": [b"http://example.com/a.wav"]}, {}, "not a WAV, FLAC, OGG, MP3"),
        ({"audio": [b""]}, {}, "it is empty"),
        ({"samples": np.zeros((1, 0), np.float32)}, {}, "it contains no samples"),
        ({"samples": np.full((1, 400), np.nan, np.float32)}, {}, "not finite numbers"),
        ({"samples": SHORT[None]}, {"sampling_rate": 3}, "sampling rate is 3 Hz"),
        ({"samples": SHORT[None]}, {"return_timestamps": "page"}, "this model supports: none, segment, word"),
        ({"samples": SHORT[None]}, {"task": "sing"}, "transcribe or translate"),
    ],
)
def test_what_cannot_be_heard_is_refused(
    whisper: Task, inputs: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConchError, match=message) as caught:
        whisper.prepare(ask(inputs, **options))
    assert caught.value.code is Code.INVALID_ARG


def test_models_without_languages_refuse_one(ctc: Task) -> None:
    for name in ("language", "prompt"):
        with pytest.raises(ConchError, match=f"input '{name}' is not supported by this model"):
            ctc.prepare(ask({"samples": SHORT[None]}, **{name: "de"}))
    assert texts(ctc, ask({"samples": SHORT[None]}, return_language=True), output="language") == [[""]]


def test_recording_beyond_the_limit_is_refused(ctc_folder: Path) -> None:
    task = open_task(ctc_folder, max_audio_seconds=3)
    for inputs in ({"samples": LONG[None]}, {"audio": [sound_file(LONG)]}):
        with pytest.raises(ConchError, match="5 seconds long; at most 3 are read"):
            task.prepare(ask(inputs))


def test_cancelled_request_leaves_the_other_rows_alone(whisper: Task) -> None:
    going = ask({"samples": OTHER[None]})
    wanted = texts(whisper, going)
    cancelled = ask({"samples": SHORT[None]})
    cancelled.cancelled = True
    ended, answered = answers(whisper, cancelled, going)
    assert isinstance(ended, ConchError)
    assert ended.code is Code.CANCELLED
    assert isinstance(answered, Result)
    assert [answered.outputs["text_output"].elements] == wanted  # type: ignore[union-attr]


def test_text_of_each_window_is_sent_when_it_is_final(whisper: Task) -> None:
    request = ask({"samples": LONG[None]})
    ((wanted,),) = texts(whisper, request)
    sent = previewed(request)
    (answered,) = answers(whisper, request)
    assert isinstance(answered, Result)
    assert answered.outputs["text_output"].elements == [wanted]  # type: ignore[union-attr]
    assert len(set(filter(None, sent))) > 1
    assert all(wanted.startswith(text) for text in sent)
    assert sorted(sent, key=len) == sent


@pytest.mark.parametrize("form", ["whisper", "ctc"])
def test_text_of_chunks_is_sent_without_the_last_one(
    form: str, whisper_folder: Path, ctc_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conch.backends.tasks.speech.BATCH_CHUNKS", 2)
    folder = shutil.copytree(whisper_folder if form == "whisper" else ctc_folder, tmp_path / form)
    if form == "ctc":
        model = transformers.Wav2Vec2ForCTC.from_pretrained(folder)
        model.lm_head.bias.data[4] += 1  # more spaces
        model.save_pretrained(folder)
    task = open_task(folder, chunk_length_s=1)
    request = ask({"samples": LONG[None]})
    ((wanted,),) = texts(task, request)
    sent = previewed(request)
    assert texts(task, request) == [[wanted]]
    assert any(sent)
    assert all(wanted.strip().startswith(text.strip()) for text in sent)


def test_cancelled_recording_ends_before_its_next_window(whisper: Task) -> None:
    request = ask({"samples": LONG[None]})
    sent: list[str] = []

    def leave(text: str) -> None:
        sent.append(text)
        request.cancelled = True

    request.preview = leave
    (ended,) = answers(whisper, request)
    assert isinstance(ended, ConchError)
    assert ended.code is Code.CANCELLED
    assert len(sent) == 1


def test_segments_have_the_scores_of_their_window(whisper: Task, whisper_pipeline: Any) -> None:
    options = {"return_timestamps": "segment", "language": "en"}
    plain, scored = (
        json.loads(texts(whisper, ask({"samples": LONG[None]}, **chosen), output="chunks")[0][0])
        for chosen in (options, {**options, "return_scores": True})
    )
    assert [{name: chunk[name] for name in ("text", "start", "end")} for chunk in scored] == plain
    wanted = first_scores(whisper_pipeline, LONG)
    assert {name: scored[0][name] for name in wanted} == wanted
    assert all(chunk["avg_logprob"] < 0 < chunk["no_speech_prob"] < 1 for chunk in scored)
    seeks = [chunk["seek"] for chunk in scored]
    assert seeks == sorted(seeks)
    assert len({(chunk["seek"], chunk["avg_logprob"]) for chunk in scored}) == len(set(seeks)) > 2
    sampled = ask({"samples": LONG[None]}, **options, return_scores=True, do_sample=True, temperature=0.7)
    assert {chunk["temperature"] for chunk in json.loads(texts(whisper, sampled, output="chunks")[0][0])} == {0.7}


def first_scores(pipeline: Any, samples: Any) -> dict[str, Any]:
    """The scores of the first window, as openai-whisper defines them."""
    model, tokenizer = pipeline.model, pipeline.tokenizer
    extracted = pipeline.feature_extractor(samples, sampling_rate=RATE, truncation=False, return_tensors="pt")
    features = extracted["input_features"][..., : WINDOW * 100]
    output = model.generate(
        features, return_timestamps=True, language="en", force_unique_generate_call=True, output_scores=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    tokens = output.sequences[0][-len(output.scores) :]
    pairs = zip(output.scores, tokens, strict=True)
    total = sum(torch.log_softmax(scores[0], -1)[token].item() for scores, token in pairs)
    start = torch.tensor([[model.generation_config.decoder_start_token_id]])
    probabilities = model(features, decoder_input_ids=start).logits[0, 0].softmax(-1)
    text = tokenizer.decode(tokens, skip_special_tokens=True).strip().encode()
    ended = tokens[-1].item() == tokenizer.eos_token_id
    return {
        "seek": 0, "temperature": 0.0, "avg_logprob": pytest.approx(total / (len(tokens) - ended + 1), abs=1e-4),
        "no_speech_prob": pytest.approx(
            probabilities[tokenizer.convert_tokens_to_ids("<|nospeech|>")].item(), abs=1e-5
        ),
        "compression_ratio": pytest.approx(len(text) / len(zlib.compress(text))),
    }  # fmt: skip


@pytest.mark.parametrize("count", [1, 10, 399])
def test_sound_too_short_for_one_frame_is_refused(ctc: Task, count: int) -> None:
    reason = f"it is too short: it has {count} samples at 16000 Hz, and the model needs 400"
    sound = SHORT[:count]
    for inputs, name in (({"samples": sound[None]}, "samples"), ({"audio": [sound_file(sound)]}, "audio")):
        with pytest.raises(ConchError, match=f"input '{name}' in row 0 cannot be read: {reason}") as error:
            ctc.prepare(ask(inputs))
        assert error.value.code is Code.INVALID_ARG


def test_the_shortest_sound_is_transcribed(ctc: Task, whisper: Task) -> None:
    assert len(texts(ctc, ask({"samples": SHORT[None, :400]}))) == 1
    assert len(texts(whisper, ask({"samples": SHORT[None, :1]}))) == 1


def test_beams_are_those_of_the_pipeline(whisper: Task, whisper_pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = whisper_pipeline(raw(SHORT), generate_kwargs={"num_beams": 3})["text"]
    run, rows = CompiledGraph.infer, []

    def infer(graph: CompiledGraph, names: Any, inputs: Any) -> Any:
        rows.extend(len(array) for array in inputs.values())
        return run(graph, names, inputs)

    monkeypatch.setattr(CompiledGraph, "infer", infer)
    assert texts(whisper, ask({"samples": SHORT[None]}, num_beams=3)) == [[wanted]]
    # Beams of one recording share its encoding, and the keys and values of cross attention.
    assert set(rows) <= {1}


def test_engine_is_reported(whisper: Task, request: pytest.FixtureRequest) -> None:
    converted = "openvino" in request.node.callspec.id
    assert whisper.runtime_facts.get("variant") == ("openvino-fp32" if converted else None)


@pytest.mark.parametrize("chunk", ["-1", "0.01"])
def test_chunks_too_short_for_sound_are_refused_at_load(ctc_folder: Path, chunk: str) -> None:
    with pytest.raises(ConchError, match=f"parameter 'chunk_length_s' is {chunk}; it must be 0"):
        open_task(ctc_folder, chunk_length_s=chunk)
