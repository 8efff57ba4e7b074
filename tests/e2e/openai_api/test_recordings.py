"""Transcriptions and translations with OpenAI's client: every format of responses, and refused requests."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers
from openai.types.audio import (
    Transcription,
    TranscriptionTextDeltaEvent,
    TranscriptionTextDoneEvent,
    TranscriptionVerbose,
    TranslationVerbose,
)

from tests import task_checkpoints
from tests.models import build
from tests.servers import ConchServer
from tests.task_checkpoints import RATE, sound_file, tone

SHORT, LONG = tone(1.2), tone(5.3, seed=1)
KEY = "key"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recordings") / "models"
    task_checkpoints.whisper(folder / "whisper" / "1")
    task_checkpoints.ctc(folder / "ctc" / "1")
    build(folder, "identity_fp32")
    return folder


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[ConchServer]:
    restricted = f"--http-restricted-api=inference:authorization=Bearer {KEY}"
    with ConchServer(models, restricted, log=models.parent / "log") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ConchServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def pipeline(models: Path) -> Any:
    make: Any = transformers.pipeline
    whisper = make(
        "automatic-speech-recognition", model=str(models / "whisper" / "1"), device="cpu", dtype=torch.float32
    )

    def transcribe(samples: Any, **options: Any) -> Any:
        return whisper({"raw": samples.copy(), "sampling_rate": RATE}, **options)

    return transcribe


def recording(samples: Any = SHORT, **options: Any) -> tuple[str, bytes]:
    return 'a "b".wav', sound_file(samples, subtype="FLOAT", **options)


def seconds(clock: str) -> float:
    hours, minutes, rest = clock.split(":")
    return 3600 * int(hours) + 60 * int(minutes) + float(rest)


def test_recording_is_transcribed(client: Any, pipeline: Any) -> None:
    wanted = pipeline(SHORT)["text"].strip()
    answer = client.audio.transcriptions.create(model="whisper", file=recording())
    assert isinstance(answer, Transcription)
    assert answer.text == wanted
    assert answer.usage is not None
    assert answer.usage.model_dump() == {"type": "duration", "seconds": 1.2}
    assert (
        client.audio.transcriptions.create(model="whisper", file=recording(), response_format="text") == f"{wanted}\n"
    )


def test_language_and_prompt_reach_the_model(client: Any, pipeline: Any, models: Path) -> None:
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(models / "whisper" / "1")
    prompt = tokenizer.get_prompt_ids("hello there", return_tensors="pt")
    for members, chosen in (
        ({"language": "de"}, {"language": "de"}),
        ({"prompt": "hello there"}, {"prompt_ids": prompt}),
    ):
        answer = client.audio.transcriptions.create(model="whisper", file=recording(), **members)
        assert answer.text == pipeline(SHORT, generate_kwargs=chosen)["text"].strip() != pipeline(SHORT)["text"].strip()


def test_translation_is_the_task_translate(client: Any, pipeline: Any) -> None:
    wanted = pipeline(SHORT, generate_kwargs={"task": "translate"})["text"].strip()
    answer = client.audio.translations.create(model="whisper", file=recording())
    assert answer.model_dump() == {"text": wanted}
    verbose = client.audio.translations.create(model="whisper", file=recording(LONG), response_format="verbose_json")
    assert isinstance(verbose, TranslationVerbose)
    assert verbose.segments
    assert TranslationVerbose.model_validate(verbose.to_dict()).language == "english"


@pytest.mark.parametrize("samples", [SHORT, LONG], ids=["short", "long"])
def test_verbose_transcription_has_segments_and_words(client: Any, pipeline: Any, samples: Any) -> None:
    length = len(samples) / RATE
    answer = client.audio.transcriptions.create(
        model="whisper", file=recording(samples), response_format="verbose_json",
        timestamp_granularities=["segment", "word"],
    )  # fmt: skip
    assert isinstance(answer, TranscriptionVerbose)
    TranscriptionVerbose.model_validate(answer.to_dict())  # the client itself does not check the types
    wanted = pipeline(samples, return_timestamps=True, return_language=True)
    words = pipeline(samples, return_timestamps="word")["chunks"]
    assert answer.text == wanted["text"].strip()
    assert (answer.language, answer.duration) == (wanted["chunks"][0]["language"], round(length, 3))
    assert [segment.text for segment in answer.segments or ()] == [chunk["text"] for chunk in wanted["chunks"]]
    assert [segment.id for segment in answer.segments or ()] == list(range(len(wanted["chunks"])))
    assert all(segment.avg_logprob < 0 < segment.no_speech_prob < 1 for segment in answer.segments or ())
    for found, chunks in ((answer.segments, wanted["chunks"]), (answer.words, words)):
        times = [(item.start, item.end) for item in found or ()]
        assert times == [
            (round(start or 0, 3), round(length if end is None else end, 3))
            for start, end in (chunk["timestamp"] for chunk in chunks)
        ]
    assert [word.word for word in answer.words or ()] == [chunk["text"].strip() for chunk in words]


def test_subtitles_have_a_cue_for_each_segment(client: Any, pipeline: Any) -> None:
    chunks = pipeline(LONG, return_timestamps=True)["chunks"]
    for form, head, comma in (("srt", "1\n", ","), ("vtt", "WEBVTT\n\n", ".")):
        text = client.audio.transcriptions.create(model="whisper", file=recording(LONG), response_format=form)
        assert text.startswith(head)
        cues = [line.split(" --> ") for line in text.splitlines() if "-->" in line]
        times = [[seconds(clock.replace(comma, ".")) for clock in cue] for cue in cues]
        assert times == [
            [pytest.approx(chunk["timestamp"][0] or 0), pytest.approx(chunk["timestamp"][1] or len(LONG) / RATE)]
            for chunk in chunks
        ]


def test_stream_has_the_text_and_its_end(client: Any, pipeline: Any) -> None:
    wanted = pipeline(SHORT)["text"].strip()
    events = list(client.audio.transcriptions.create(model="whisper", file=recording(), stream=True))
    *deltas, done = events
    assert all(isinstance(event, TranscriptionTextDeltaEvent) for event in deltas)
    assert isinstance(done, TranscriptionTextDoneEvent)
    assert "".join(event.delta for event in deltas) == done.text == wanted


def test_stream_of_a_long_recording_has_an_event_for_each_window(client: Any, server: ConchServer) -> None:
    for route in ("transcriptions", "translations"):
        wanted = getattr(client.audio, route).create(model="whisper", file=recording(LONG)).text
        # OpenAI's client does not stream translations.
        reply = httpx.post(
            f"http://{server.http}/v1/audio/{route}", headers={"Authorization": f"Bearer {KEY}"}, timeout=60,
            data={"model": "whisper", "stream": "true"}, files={"file": recording(LONG)},
        )  # fmt: skip
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        *deltas, done = [json.loads(line[6:]) for line in reply.text.splitlines() if line]
        assert [event["type"] for event in deltas] == ["transcript.text.delta"] * len(deltas)
        assert len(deltas) > 1
        assert "".join(event["delta"] for event in deltas) == wanted
        assert done == {"type": "transcript.text.done", "text": wanted}


def test_speech_models_are_listed(client: Any, server: ConchServer) -> None:
    names = {model.id for model in client.models.list()}
    assert {"whisper", "ctc"} <= names
    assert "identity_fp32" not in names
    with pytest.raises(openai.BadRequestError, match="use /v1/audio/transcriptions"):
        client.embeddings.create(model="ctc", input="hello")


@pytest.mark.parametrize(
    ("members", "param", "message"),
    [
        ({"model": "none"}, "model", "models that do: 'ctc', 'whisper'"),
        ({"model": "identity_fp32"}, "model", "models that do: 'ctc', 'whisper'"),
        ({"extra_body": {"diarize": "true"}}, "diarize", "not known here"),
        ({"extra_body": {"temprature": "1"}}, "temprature", "did you mean 'temperature'"),
        ({"response_format": "diarized_json"}, "response_format", "one of json, text"),
        ({"temperature": 2}, "temperature", "from 0 to 1"),
        ({"extra_body": {"stream": "perhaps"}}, "stream", "true or false"),
        ({"stream": True, "response_format": "srt"}, "stream", "not supported with the response format srt"),
        ({"timestamp_granularities": ["word"]}, "timestamp_granularities[]", "needs the response format"),
        ({"include": ["logprobs"]}, "include[]", "not known here"),
        ({"file": ("a.wav", b"RIFFnothing")}, "file", "'file' cannot be read"),
        ({"file": ("a.wav", b"")}, "file", "it is empty"),
        ({"language": "klingon"}, None, "klingon"),
        ({"model": "ctc", "language": "de"}, "language", "not supported by this model"),
        ({"model": "ctc", "response_format": "srt"}, "response_format", "supports: none, word, char"),
        ({"prompt": "<|startoftranscript|>"}, "prompt", "cannot be used"),
    ],
)  # fmt: skip
def test_request_is_refused_with_the_member_that_is_wrong(
    client: Any, members: dict[str, Any], param: str | None, message: str
) -> None:
    with pytest.raises(openai.APIStatusError, match=message) as refused:
        client.audio.transcriptions.create(**{"model": "whisper", "file": recording(), **members})
    assert refused.value.status_code == (404 if members.get("model") == "none" else 400)
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"


def test_key_is_needed(server: ConchServer) -> None:
    with (
        openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="other", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.audio.transcriptions.create(model="whisper", file=recording())


def post(server: ConchServer, body: bytes, content_type: str, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(server.http, timeout=60)
    connection.putrequest("POST", "/v1/audio/transcriptions")
    sent = {"Content-Length": str(len(body)), "Content-Type": content_type, "Authorization": f"Bearer {KEY}"}
    for name, value in {**sent, **headers}.items():
        connection.putheader(name, value)
    connection.endheaders(body)
    reply = connection.getresponse()
    status, data = reply.status, json.loads(reply.read())
    connection.close()
    return status, data


@pytest.mark.parametrize("size", [10, 1 << 20], ids=["small", "offloaded"])
def test_form_that_is_cut_off_or_has_too_many_parts_is_refused(server: ConchServer, size: int) -> None:
    part = b'--edge\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + bytes(size) + b"\r\n"
    many = b'--edge\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n' * 5000
    for body, content_type, message in (
        (part + b"--edge", "multipart/form-data; boundary=edge", "not followed"),
        (part[:-4], "multipart/form-data; boundary=edge", "ends before its last boundary"),
        (part + many, "multipart/form-data; boundary=edge", "more than 64 parts"),
        (part + b"--edge--", "multipart/form-data", "no boundary"),
        (part + b"--edge--", "multipart/form-data; boundary=edge", "'model' is missing"),
        (part + part + b"--edge--", "multipart/form-data; boundary=edge", "'file' twice"),
        (b'{"model": "whisper"}', "application/json", "must be multipart/form-data"),
    ):
        status, reply = post(server, body, content_type)
        assert status == 400
        assert message in reply["error"]["message"]


def test_form_declared_too_large_is_refused_before_it_arrives(server: ConchServer) -> None:
    length = {"Content-Length": str(2 << 30)}
    status, reply = post(server, b"", "multipart/form-data; boundary=edge", **length)
    assert status in (400, 413)
    assert "exceeds" in reply["error"]["message"]


def test_recording_that_is_offloaded_is_transcribed(client: Any, pipeline: Any) -> None:
    file = ("a.wav", sound_file(tone(5.3, 4 * RATE, seed=1), rate=4 * RATE, subtype="FLOAT"))
    assert len(file[1]) > 1 << 20
    assert (
        client.audio.transcriptions.create(model="whisper", file=file, response_format="verbose_json").duration == 5.3
    )
