"""OpenAI's transcriptions and translations of recordings: the form of a request, and the body of its response."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

import numpy as np
import orjson

from conch.core.errors import ConchError, internal
from conch.core.inference import ModelSignature
from conch.core.tensors import WireTensor, split_bytes
from conch.wire.multipart import FormPart
from conch.wire.openai.inputs import model_inputs
from conch.wire.openai.models import AUDIO, CHUNKS, TEXT
from conch.wire.openai.reading import ApiError, Fields, wrong

FILE: Final = "file"
GRANULARITIES: Final = "timestamp_granularities[]"
#: Whisper's frames in a second, the unit of ``seek``.
_FRAMES: Final = 100
#: The values of ``response_format``, and their content types.
CONTENT_TYPES: Final = {
    "json": b"application/json", "text": b"text/plain; charset=utf-8", "srt": b"text/plain; charset=utf-8",
    "vtt": b"text/vtt; charset=utf-8", "verbose_json": b"application/json",
}  # fmt: skip
#: The members of requests by the names of the model's inputs, for errors of the model.
_MEMBERS: Final = {
    AUDIO: FILE, "language": "language", "prompt": "prompt", "temperature": "temperature",
    "return_timestamps": "response_format",
}  # fmt: skip
#: The scores of segments that a model may report.
_SCORES: Final[Mapping[str, Callable[[Any], Any]]] = {
    "seek": int, "temperature": float, "avg_logprob": float, "compression_ratio": float, "no_speech_prob": float,
}  # fmt: skip
_INPUT: Final = re.compile(r"input '(\w+)'( in row 0)?")
_FLAGS: Final = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionPlan:
    """Converts the outputs of the model to the response.

    ``timestamps`` has the ``return_timestamps`` of each request to the model: ``none``, ``segment`` or ``word``.
    """

    task: str
    format: str
    stream: bool
    temperature: float
    timestamps: list[str]

    def body(self, parts: Sequence[Sequence[WireTensor]], sent: str = "") -> bytes:
        """Return the body, or the last events of a stream, from the outputs of each request to the model.

        ``sent`` is the text of the earlier events.
        """
        results = {kind: _read(outputs) for kind, outputs in zip(self.timestamps, parts, strict=True)}
        first = next(iter(results.values()))
        text = first["text"].strip()
        if self.stream:
            return text_delta(sent, text)[1] + _event({"type": "transcript.text.done", "text": text})
        if self.format == "text":
            return f"{text}\n".encode()
        if self.format in ("srt", "vtt"):
            return _subtitles(first["chunks"], self.format)
        document: dict[str, Any] = {"text": text}
        if self.format == "verbose_json":
            language = "english" if self.task == "translate" else first["language"]
            document |= {"task": self.task, "language": language, "duration": _duration(results.values())}
            if "segment" in results:
                chunks = results["segment"]["chunks"]
                document["segments"] = [self._segment(index, chunk) for index, chunk in enumerate(chunks)]
            if "word" in results:
                document["words"] = [
                    {"word": chunk["text"].strip(), "start": chunk["start"], "end": chunk["end"]}
                    for chunk in results["word"]["chunks"]
                ]
        if self.task == "transcribe" and first["duration"] is not None:
            document["usage"] = {"type": "duration", "seconds": first["duration"]}
        return orjson.dumps(document)

    def _segment(self, index: int, chunk: Mapping[str, Any]) -> dict[str, Any]:
        """Return OpenAI's segment; ``avg_logprob`` and ``no_speech_prob`` are 0 unless the model reports them."""
        text = chunk["text"].encode()
        return {
            "id": index, "seek": round(_FRAMES * chunk["start"]), "start": chunk["start"], "end": chunk["end"],
            "text": chunk["text"], "tokens": [], "temperature": self.temperature, "avg_logprob": 0.0,
            "compression_ratio": len(text) / len(zlib.compress(text)), "no_speech_prob": 0.0,
        } | {name: chunk[name] for name in _SCORES if name in chunk}  # fmt: skip


def read_transcription(
    parts: Sequence[FormPart], task: str, signature_of: Callable[[str], ModelSignature]
) -> tuple[TranscriptionPlan, list[dict[str, WireTensor]]]:
    """Read a form: the plan of the response, and the inputs of each request to the model.

    ``task`` is ``transcribe`` or ``translate``. ``signature_of`` is called with the name of the model; its errors
    refuse the request. Raises ApiError for invalid or unknown members.
    """
    fields, file = _fields(parts)
    signature = signature_of(fields.required_text("model"))
    if file is None:
        raise fields.missing(FILE)
    form = fields.text("response_format") or "json"
    if form not in CONTENT_TYPES:
        raise wrong("response_format", form, f"one of {', '.join(CONTENT_TYPES)}")
    stream = _flag(fields, "stream")
    if stream and form not in ("json", "text"):
        raise ApiError(f"'stream' is not supported with the response format {form}", "stream")
    temperature = _number(fields, "temperature", 0, 1) or 0.0
    timestamps = _timestamps(fields, form) if task == "transcribe" else [_TIMESTAMPS.get(form, "none")]
    strategy = fields.take("chunking_strategy")
    if strategy not in (None, "auto"):
        raise wrong("chunking_strategy", strategy, "auto")
    language, prompt = fields.text("language"), fields.text("prompt")
    fields.finish()
    values = {
        "language": language, "prompt": prompt, "task": "translate" if task == "translate" else None,
        "temperature": temperature or None, "do_sample": True if temperature else None,
    }  # fmt: skip
    given = {name: value for name, value in values.items() if value is not None}
    inputs = []
    for kind in timestamps:
        chosen = given | ({"return_timestamps": kind} if kind != "none" else {})
        details = {"return_language": True, "return_scores": True} if form == "verbose_json" else {}
        inputs.append(model_inputs(signature, {AUDIO: bytes(file)}, chosen, details))
    plan = TranscriptionPlan(task=task, format=form, stream=stream, temperature=temperature, timestamps=timestamps)
    return plan, inputs


def text_delta(sent: str, text: str) -> tuple[str, bytes]:
    """Return the sent text after an event with what ``text`` adds to it, and the event, empty if it adds nothing."""
    text = text.strip()
    if len(text) <= len(sent):
        return sent, b""
    return text, _event({"type": "transcript.text.delta", "delta": text[len(sent) :]})


def named_member(error: ConchError) -> ConchError:
    """Return an error of the model with the member of the request in place of the input."""
    match = _INPUT.search(error.public)
    member = _MEMBERS.get(match[1]) if match is not None else None
    if match is None or member is None:
        return error
    return ApiError(error.public.replace(match[0], f"'{member}'", 1), member, code=error.code)


#: The timestamps that a format needs.
_TIMESTAMPS: Final = {"srt": "segment", "vtt": "segment", "verbose_json": "segment"}


def _timestamps(fields: Fields, form: str) -> list[str]:
    granularities = fields.array(GRANULARITIES) or []
    for granularity in granularities:
        if granularity not in ("segment", "word"):
            raise wrong(GRANULARITIES, granularity, "segment or word")
    if granularities and form != "verbose_json":
        raise ApiError(f"'{GRANULARITIES}' needs the response format verbose_json", GRANULARITIES)
    return list(dict.fromkeys(granularities)) or [_TIMESTAMPS.get(form, "none")]


def _fields(parts: Sequence[FormPart]) -> tuple[Fields, memoryview | None]:
    """Return the texts of a form as members, and the content of its file. Empty texts are missing members."""
    members: dict[str, Any] = {}
    file = None
    for part in parts:
        name = GRANULARITIES if part.name == GRANULARITIES.removesuffix("[]") else part.name
        if name == FILE and file is None:
            file = part.content
            continue
        try:
            text = bytes(part.content).decode()
        except UnicodeDecodeError:
            raise ApiError(f"'{name}' is not UTF-8", name) from None
        if name.endswith("[]"):
            members.setdefault(name, []).append(text)
        elif name in members or name == FILE:
            raise ApiError(f"the form has '{name}' twice", name)
        elif text:
            members[name] = text
    return Fields(members), file


def _flag(fields: Fields, member: str) -> bool:
    value = fields.text(member)
    flag = _FLAGS.get(value.lower()) if value is not None else False
    if flag is None:
        raise wrong(member, value, "true or false")
    return flag


def _number(fields: Fields, member: str, low: float, high: float) -> float | None:
    value = fields.text(member)
    if value is None:
        return None
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not isfinite(number) or not low <= number <= high:
        raise wrong(member, value, f"a number from {low:g} to {high:g}")
    return number


def _read(outputs: Sequence[WireTensor]) -> dict[str, Any]:
    """Return the text, chunks, duration (seconds, None if it is not reported) and language of a transcription."""
    tensors = {tensor.name: tensor for tensor in outputs}
    texts = {name: _only(tensors, name) for name in (TEXT, CHUNKS, "language")}
    duration = tensors.get("duration")
    try:
        chunks = [
            {
                "text": str(chunk["text"]),
                "start": float(chunk["start"]),
                "end": float(chunk["end"]),
                **{name: read(chunk[name]) for name, read in _SCORES.items() if name in chunk},
            }
            for chunk in orjson.loads(texts[CHUNKS] or "[]")
        ]
        seconds = None if duration is None else round(np.frombuffer(duration.data, "<f4").item(), 3)
    except (ValueError, TypeError, KeyError) as error:
        raise internal(f"the model's output is not a transcription: {error}") from None
    return {"text": texts[TEXT], "chunks": chunks, "duration": seconds, "language": texts["language"]}


def _duration(results: Iterable[Mapping[str, Any]]) -> float:
    """Return the duration of a recording (seconds); if the model does not report it, the end of the last chunk."""
    reported = [result["duration"] for result in results if result["duration"] is not None]
    ends: list[float] = [chunk["end"] for result in results for chunk in result["chunks"]]
    return float(reported[0]) if reported else max(ends, default=0.0)


def _only(tensors: Mapping[str, WireTensor], name: str) -> str:
    """Return the only element of a BYTES output, empty if it is missing."""
    elements = split_bytes(tensors[name].data) if name in tensors else []
    return elements[0].decode("utf-8", "replace") if elements else ""


def _event(members: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(members)


def _subtitles(chunks: Sequence[Mapping[str, Any]], form: str) -> bytes:
    """Return segments as SubRip or WebVTT."""
    srt = form == "srt"
    cues = [
        (f"{index}\n" if srt else "")
        + f"{_clock(chunk['start'], srt)} --> {_clock(chunk['end'], srt)}\n{_cue(chunk['text'])}\n"
        for index, chunk in enumerate(chunks, 1)
    ]
    return "\n".join(cues if srt else ["WEBVTT\n", *cues]).encode()


def _cue(text: str) -> str:
    """Return the text of a cue, which an empty line or an arrow would end."""
    return " ".join(text.split()).replace("-->", "->")


def _clock(seconds: float, srt: bool) -> str:
    milliseconds = round(1000 * seconds)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    comma = "," if srt else "."
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{milliseconds // 1000:02d}{comma}{milliseconds % 1000:03d}"
