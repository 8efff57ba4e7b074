"""Transcriptions of models other than checkpoints: their inputs, and the responses from their outputs."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from openai.types.audio import TranscriptionVerbose

from conch.core.errors import Code, ConchError
from conch.core.inference import ModelSignature, TensorSpec
from conch.core.tensors import WireTensor
from conch.wire.multipart import FormPart
from conch.wire.openai.reading import ApiError
from conch.wire.transcriptions import TranscriptionPlan, read_transcription

SIGNATURE = ModelSignature(
    "speech",
    1,
    0,
    {"audio": TensorSpec("audio", "BYTES", (1,)), "task": TensorSpec("task", "BYTES", (1,), optional=True)},
    {name: TensorSpec(name, "BYTES", (1,)) for name in ("text_output", "chunks")},
)


def read(task: str = "transcribe", **members: str) -> Any:
    parts = [FormPart(name, None, memoryview(text.encode())) for name, text in members.items()]
    return read_transcription([*parts, FormPart("file", "a", memoryview(b"RIFF"))], task, lambda name: SIGNATURE)


def body(form: str, chunks: Any, *timestamps: str) -> bytes:
    outputs = [text("text_output", " Hello. "), text("chunks", orjson.dumps(chunks).decode())]
    plan = TranscriptionPlan(
        task="transcribe", format=form, stream=False, temperature=0.0, timestamps=list(timestamps or ("segment",))
    )
    return plan.body([outputs] * len(plan.timestamps))


def text(name: str, content: str) -> WireTensor:
    data = content.encode()
    return WireTensor(name, "BYTES", (1,), len(data).to_bytes(4, "little") + data)


def test_only_inputs_of_the_model_are_set() -> None:
    plan, (inputs,) = read("translate", model="speech", language="")
    assert plan.timestamps == ["none"]
    assert {name: bytes(tensor.data)[4:] for name, tensor in inputs.items()} == {"audio": b"RIFF", "task": b"translate"}
    with pytest.raises(ApiError, match="no input for 'return_timestamps'"):
        read("translate", model="speech", response_format="srt")
    with pytest.raises(ApiError, match="no input for 'language'") as refused:
        read(model="speech", language="de")
    assert refused.value.param == "language"


def test_cues_keep_hours_and_lose_what_would_end_them() -> None:
    chunks = [{"text": " a\n\nb --> c", "start": 3599.9996, "end": 36000.5}]
    assert body("srt", chunks) == b"1\n01:00:00,000 --> 10:00:00,500\na b -> c\n"
    assert body("vtt", chunks) == b"WEBVTT\n\n01:00:00.000 --> 10:00:00.500\na b -> c\n"
    assert (body("srt", []), body("vtt", [])) == (b"", b"WEBVTT\n")


def test_words_alone_have_no_segments() -> None:
    document = orjson.loads(body("verbose_json", [{"text": " Hello.", "start": 0, "end": 1}], "word"))
    assert document["words"] == [{"word": "Hello.", "start": 0.0, "end": 1.0}]
    assert "segments" not in document
    assert (document["text"], document["duration"]) == ("Hello.", 1.0)


@pytest.mark.parametrize(("chunks", "duration"), [([{"text": "a", "start": 0.5, "end": 2.0}], 2.0), ([], 0.0)])
def test_model_that_reports_no_duration_gives_the_end_of_the_text(chunks: Any, duration: float) -> None:
    answer = TranscriptionVerbose.model_validate_json(body("verbose_json", chunks))
    assert (answer.duration, answer.language, answer.usage) == (duration, "", None)
    assert [segment.seek for segment in answer.segments or ()] == [50] * len(chunks)


@pytest.mark.parametrize("chunks", [[{"text": "a"}], {"text": "a"}, [1], [{"text": "a", "start": "x", "end": 1}]])
def test_chunks_in_another_form_fail(chunks: Any) -> None:
    with pytest.raises(ConchError, match="not a transcription") as failed:
        body("srt", chunks)
    assert failed.value.code is Code.INTERNAL
