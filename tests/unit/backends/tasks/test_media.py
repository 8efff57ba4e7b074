"""Sound and images: what is read, and what is refused before it is decoded."""

from __future__ import annotations

import struct
import sys
import zlib
from base64 import b64encode
from io import BytesIO
from typing import Any

import av
import numpy as np
import pytest
import transformers
from PIL import Image

from conch.backends.tasks import media
from conch.checkpoints.options import Options
from conch.core.errors import Code, ConchError
from tests.task_checkpoints import RATE, image_file, png_chunk, sound_file, tone
from tests.task_requests import ask


def test_resampled_tone_is_the_tone_at_the_other_rate() -> None:
    times = np.arange(44_100) / 44_100
    heard = media.audio(sound_file(np.sin(2 * np.pi * 440 * times) / 2, 44_100, subtype="FLOAT"), RATE)
    wanted = np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE) / 2
    assert heard.dtype == np.float32
    assert len(heard) == RATE
    # The filter needs some samples at both ends.
    assert np.abs(heard - wanted)[200:-200].max() < 2e-3


def test_channels_are_averaged() -> None:
    left, right = tone(0.1, seed=1), tone(0.1, seed=2)
    heard = media.audio(sound_file(np.stack([left, right], 1), subtype="FLOAT"), RATE)
    np.testing.assert_allclose(heard, (left + right) / 2, atol=1e-6)


@pytest.mark.parametrize("prefix", [b"", b"data:audio/wav;base64,", b"data:;base64,"])
def test_base64_is_read(prefix: bytes) -> None:
    file = sound_file(tone(0.1))
    heard = media.audio(prefix + b64encode(file), RATE)
    np.testing.assert_array_equal(heard, media.audio(file, RATE))


def encoded(format: str, codec: str, rate: int, seconds: float = 1.5, channels: int = 1) -> bytes:
    """A tone of 440 Hz as a file of FFmpeg."""
    wave = np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate).astype(np.float32) / 2
    layout = "stereo" if channels == 2 else "mono"
    frame = av.AudioFrame.from_ndarray(np.stack([wave] * channels), format="fltp", layout=layout)
    frame.sample_rate = rate
    file = BytesIO()
    with av.open(file, "w", format=format) as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.layout = layout
        resampler = av.AudioResampler(format=stream.codec_context.format, layout=layout, rate=rate)
        for converted in (*resampler.resample(frame), *resampler.resample(None), None):
            container.mux(stream.encode(converted))
    return file.getvalue()


#: Formats and codecs of files that FFmpeg reads, with their sampling rates.
CONTAINERS = {
    "m4a": ("ipod", "aac", 44_100), "alac": ("mp4", "alac", 16_000), "webm": ("webm", "libopus", 48_000),
    "mkv": ("matroska", "aac", 44_100), "aac": ("adts", "aac", 16_000),
}  # fmt: skip


def assert_is_tone(heard: media.Samples, seconds: float) -> None:
    """The samples are 440 Hz for about ``seconds``; codecs add up to 2048 samples and change the ends."""
    assert heard.dtype == np.float32
    assert 0 <= len(heard) - RATE * seconds < 2500
    middle = heard[4000:20_000]
    assert np.abs(np.fft.rfft(middle)).argmax() == 440
    assert np.sqrt((middle**2).mean()) == pytest.approx(0.5 / np.sqrt(2), rel=0.05)


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_files_of_ffmpeg_are_read(kind: str, channels: int) -> None:
    assert_is_tone(media.audio(encoded(*CONTAINERS[kind], channels=channels), RATE), 1.5)


def test_mp3_is_read_with_and_without_a_tag() -> None:
    times = np.arange(int(1.5 * RATE)) / RATE
    file = sound_file(np.sin(2 * np.pi * 440 * times) / 2, format="MP3")
    for tag in (b"", b"ID3\x04\x00\x00\x00\x00\x00\x0a" + bytes(10)):
        assert_is_tone(media.audio(tag + file, RATE), 1.5)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_long_or_damaged_files_of_ffmpeg_are_refused(kind: str) -> None:
    file = encoded(*CONTAINERS[kind], seconds=2.5)
    with pytest.raises(ConchError, match="at most 2 are read"):
        media.audio(file, RATE, seconds=2)
    for cut in (12, 40, 200):
        with pytest.raises(ConchError, match="input 'audio' in row 0 cannot be read") as refused:
            media.audio(file[:cut], RATE)
        assert refused.value.code is Code.INVALID_ARG
    rng = np.random.default_rng(0)
    for _ in range(20):
        damaged = bytearray(file)
        for position in rng.integers(12, len(file), 30):
            damaged[position] ^= 0xFF
        try:
            assert np.isfinite(media.audio(bytes(damaged), RATE)).all()
        except ConchError as error:
            assert error.code is Code.INVALID_ARG


def test_codecs_that_are_not_for_sound_files_are_refused() -> None:
    with pytest.raises(ConchError, match="its sound is encoded as ac3"):
        media.audio(encoded("matroska", "ac3", 48_000), RATE)


def test_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    file = encoded(*CONTAINERS["webm"])
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConchError, match=r"reading M4A, WebM and AAC files needs av: .*\[media\]") as refused:
        media.audio(file, RATE)
    assert refused.value.code is Code.UNSUPPORTED


def test_header_that_promises_hours_is_refused_before_decoding() -> None:
    file = bytearray(sound_file(np.zeros(4000, np.int16), 1000, "FLAC", "PCM_16"))
    # The 36 bits of the number of samples in STREAMINFO.
    file[21] |= 0x0F
    file[22:26] = b"\xff\xff\xff\xff"
    with pytest.raises(ConchError, match="seconds long; at most 3600 are read"):
        media.audio(bytes(file), RATE)


def test_stream_without_a_length_is_refused() -> None:
    file = bytearray(sound_file(np.zeros(4000, np.int16), 1000, "FLAC", "PCM_16"))
    file[21] &= 0xF0
    file[22:26] = bytes(4)
    with pytest.raises(ConchError, match="does not contain its length"):
        media.audio(bytes(file), RATE)


@pytest.mark.parametrize("cut", [10, 30, 44])
def test_damaged_sound_is_refused(cut: int) -> None:
    with pytest.raises(ConchError, match="input 'audio' in row 2 cannot be read") as caught:
        media.audio(sound_file(tone(0.1))[:cut], RATE, row=2)
    assert caught.value.code is Code.INVALID_ARG


def test_formats_that_are_not_served_are_refused() -> None:
    with pytest.raises(ConchError, match="not a WAV, FLAC, OGG, MP3"):
        media.audio(sound_file(tone(0.1), format="AIFF"), RATE)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_images_are_read_in_rgb(format: str) -> None:
    image = media.image(image_file(7, 5, format=format))
    assert (image.mode, image.size) == ("RGB", (7, 5))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1"])
def test_other_colours_become_rgb(mode: str) -> None:
    assert media.image(image_file(mode=mode)).mode == "RGB"


def test_photograph_is_turned_upright(tmp_path: object) -> None:
    from io import BytesIO

    exif = Image.Exif()
    exif[0x0112] = 6
    file = BytesIO()
    Image.new("RGB", (8, 4)).save(file, "JPEG", exif=exif)
    assert media.image(file.getvalue()).size == (4, 8)


def test_image_of_too_many_pixels_is_refused_by_its_header() -> None:
    for side in (9_000, 60_000):
        header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
        file = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        with pytest.raises(ConchError, match="pixels; at most 64000000 are read"):
            media.image(file)


@pytest.mark.parametrize(
    "file", [b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", image_file()[:90], b"<svg/>", b"a.png"]
)
def test_damaged_image_is_refused(file: bytes) -> None:
    with pytest.raises(ConchError, match="input 'image' in row 3 cannot be read") as caught:
        media.image(file, row=3)
    assert caught.value.code is Code.INVALID_ARG


def test_sound_goes_out_as_a_wav_file() -> None:
    samples = tone(0.1)
    np.testing.assert_allclose(media.audio(media.wav(samples[None], RATE), RATE), samples, atol=1e-4)


def test_what_is_wrong_with_a_sound_file_is_said_without_the_name_of_an_object() -> None:
    with pytest.raises(ConchError) as refused:
        media.audio(sound_file(tone(0.1))[:30], 16_000)
    assert "BytesIO" not in refused.value.message


@pytest.mark.parametrize("name", ["max_audio_seconds", "max_image_pixels"])
def test_limits_that_nothing_keeps_to_are_refused(name: str) -> None:
    limit = media.max_seconds if name == "max_audio_seconds" else media.max_pixels
    with pytest.raises(ConchError, match=f"parameter '{name}' is 0; it must be at least 1"):
        limit(Options.from_values({name: 0}))


def test_networks_of_samples_need_as_many_as_their_convolutions() -> None:
    wav2vec2, sew = transformers.Wav2Vec2Config(), transformers.SEWConfig()
    assert media.shortest(wav2vec2) == 400 and media.shortest(transformers.WhisperConfig()) == 1
    assert media.shortest(sew) > 400


def test_recordings_of_a_request_are_limited_together() -> None:
    file = sound_file(np.zeros(4000, np.int16), 1000)
    request = ask({"audio": [file] * 5})
    with pytest.raises(ConchError, match=r"seconds long; at most 16 are read at a time \(4 times parameter 'max_audio"):
        media.sounds_of(request, RATE, seconds=4, min_samples=1)
    assert len(media.sounds_of(ask({"audio": [file] * 4}), RATE, seconds=4, min_samples=1)) == 4


def test_recording_at_a_rate_that_is_not_audible_may_be_shorter() -> None:
    """A file of silence is small at any rate; what it is decoded to is not."""
    file = sound_file(np.zeros(384_000, np.int16), 384_000, "FLAC", "PCM_16")
    with pytest.raises(ConchError, match="it is 1 seconds long; at most 0 are read"):
        media.audio(file, RATE, seconds=4)
    assert len(media.audio(file, RATE, seconds=8)) == RATE


def test_images_of_a_request_are_limited_together() -> None:
    file = image_file(20, 20)
    with pytest.raises(ConchError, match=r"more than 1600 pixels together \(4 times parameter 'max_image_pixels'\)"):
        media.images([file] * 5, pixels=400)
    assert len(media.images([file] * 4, pixels=400)) == 4


def test_strip_is_refused_whose_other_side_would_grow_without_end() -> None:
    with pytest.raises(ConchError, match="it is 1010x10; one side may be at most 100 times the other"):
        media.image(image_file(1010, 10))
    assert media.image(image_file(10, 1000)).size == (10, 1000)
