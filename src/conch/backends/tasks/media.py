"""Decodes audio and image files; limits are checked before decoding.

Called by tasks on the thread that receives a request. An input is the content of a file, raw or in base64 (also as a
``data:`` URI); it is never treated as a URL or a path.
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from conch.backends.base.arrays import Request
from conch.checkpoints.options import Options
from conch.core.errors import ConchError, invalid, one_line
from conch.core.inference import TensorSpec
from conch.machine import extras

if TYPE_CHECKING:
    from PIL.Image import Image

Samples = npt.NDArray[np.float32]

#: Supported sampling rates in Hz; limited because resampling filters grow with the rate.
RATES: Final = (1_000, 384_000)
MAX_CHANNELS: Final = 32

#: Defaults of the parameters ``max_audio_seconds`` and ``max_image_pixels``.
MAX_SECONDS: Final = 3600
MAX_PIXELS: Final = 64_000_000
#: Limit for all recordings or images of a request together, as a multiple of the limit of one.
TOGETHER: Final = 4
#: Sampling rate (Hz) above which the maximum length shrinks in proportion, because memory grows with the number of
#: samples.
_USUAL_RATE: Final = 48_000
#: The maximum aspect ratio of an image. Processors scale the shorter side to a fixed size, so the longer side of a
#: narrow strip would fill the memory.
_MAX_ASPECT: Final = 100

#: The inputs of every audio task: a file, or samples of one channel at ``sampling_rate`` Hz (default 16000).
SOUND_INPUTS: Final = (
    TensorSpec("audio", "BYTES", (1,), optional=True),
    TensorSpec("samples", "FP32", (-1,), optional=True),
    TensorSpec("sampling_rate", "INT32", (1,), optional=True),
)

#: The first bytes of audio files that soundfile reads; an MP3 file can also begin with a frame.
_AUDIO: Final = (b"RIFF", b"RIFX", b"RF64", b"fLaC", b"OggS", b"ID3")
#: The decoders of FFmpeg that are used for other audio files.
_CODECS: Final = ("aac", "alac", "flac", "libopus", "libvorbis", "mp3", "mp3float", "opus", "vorbis")
_IMAGE_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")

_DATA_URI: Final = re.compile(rb"data:[\w.+-]*/?[\w.+-]*(?:;[\w.+-]+=[^;,]*)*;base64,")
_BASE64: Final = re.compile(rb"[A-Za-z0-9+/\s]*={0,2}\s*")

#: Minimum length (samples) that soundfile reports for a FLAC stream of unknown length.
_UNKNOWN: Final = 1 << 62
#: Samples per read while decoding.
_BLOCK: Final = 1 << 20


def require_sound(task: str) -> None:
    """Raise UNSUPPORTED unless the libraries that read, resample and write audio for ``task`` are installed."""
    extras.require(f"task '{task}'", "soundfile", "scipy.signal")


def require_images(task: str) -> None:
    """Raise UNSUPPORTED unless the library that reads images for ``task`` is installed."""
    extras.require(f"task '{task}'", "PIL")


def max_seconds(options: Options) -> int:
    """Return the maximum length of a recording in seconds. Raises INVALID_ARG for a limit of 0."""
    return options.positive("max_audio_seconds", MAX_SECONDS)


def max_pixels(options: Options) -> int:
    """Return the maximum number of pixels of an image. Raises INVALID_ARG for a limit of 0."""
    return options.positive("max_image_pixels", MAX_PIXELS)


def shortest(config: Any) -> int:
    """Return the minimum number of samples that a network needs; 1 for a network that reads features.

    A network that begins with convolutions over samples needs several. ``config`` is transformers' configuration.
    """
    layers = zip(getattr(config, "conv_kernel", ()), getattr(config, "conv_stride", ()), strict=False)
    needed = int(getattr(config, "squeeze_factor", 1))  # SEW joins this many frames
    for kernel, stride in reversed(list(layers)):
        needed = (needed - 1) * stride + kernel
    return needed


def sounds_of(request: Request, rate: int, *, seconds: int, min_samples: int) -> list[Samples]:
    """Return the audio of each row at ``rate`` Hz, from input ``audio`` or else ``samples``; empty without both.

    Raises INVALID_ARG, naming the input and the row, for a recording that cannot be read, is longer than ``seconds``,
    or has fewer samples than ``min_samples``.
    """
    if request.has("audio"):
        name = "audio"
        sounds, left = [], float(TOGETHER * seconds)
        for row, data in enumerate(request.files(name)):
            sounds.append(audio(data, rate, seconds=seconds, row=row))
            left -= len(sounds[-1]) / rate
            if left < 0:
                break  # rejected below, without decoding the other rows
    elif request.has("samples"):
        name = "samples"
        source_rate = int(request.option("sampling_rate", 16_000))
        rows = request.array(name).reshape(request.rows, -1)
        sounds = [samples(values, source_rate, rate, seconds=seconds, row=row) for row, values in enumerate(rows)]
    else:
        return []
    together = sum(map(len, sounds)) / rate
    if together > TOGETHER * seconds:
        raise invalid(
            f"the recordings of the request are {together:.0f} seconds long; at most {TOGETHER * seconds} are read at "
            f"a time ({TOGETHER} times parameter 'max_audio_seconds'): send them in several requests"
        )
    for row, values in enumerate(sounds):
        if len(values) < min_samples:
            raise _broken(
                name,
                row,
                f"it is too short: it has {len(values)} samples at {rate} Hz, and the model needs {min_samples}",
            )
    return sounds


def file_bytes(data: bytes, name: str, row: int) -> bytes:
    """Return the file in ``data``, decoding base64; no supported file format looks like base64.

    Raises INVALID_ARG, naming the input and the row, for empty data and invalid base64.
    """
    if not data:
        raise _broken(name, row, "it is empty")
    prefix = _DATA_URI.match(data)
    if prefix is None and _BASE64.fullmatch(data, 0, 64) is None:
        return data
    try:
        return b64decode(b"".join(data[prefix.end() if prefix else 0 :].split()), validate=True)
    except binascii.Error as error:
        raise _broken(name, row, f"it is text, but not base64 ({error}); send the content of a file") from None


def audio(data: bytes, rate: int, *, seconds: int = MAX_SECONDS, name: str = "audio", row: int = 0) -> Samples:
    """Decode a WAV, FLAC, OGG, MP3, M4A, WebM or AAC file to mono samples at ``rate`` Hz, ``[samples]``.

    Channels are averaged. Raises INVALID_ARG, naming the input and the row, for a file in another format or one that is
    damaged, empty, or longer than ``seconds``; UNSUPPORTED if the library for the format is not installed.
    """
    data = file_bytes(data, name, row)
    container = _container(data)
    if container:
        mono, source_rate = _decode_container(data, container, seconds, name, row)
    elif data.startswith(_AUDIO) or _is_frame(data, 0xE6, 0xE2):  # MPEG layer III
        mono, source_rate = _decode_file(data, seconds, name, row)
    else:
        raise _broken(name, row, "it is not a WAV, FLAC, OGG, MP3, M4A, WebM or AAC file")
    return _checked(resample(mono, source_rate, rate), name, row)


def _container(data: bytes) -> str:
    """Return FFmpeg's name of the format of an M4A, WebM or AAC file, else empty."""
    if data[4:8] == b"ftyp":
        return "mp4"
    if data.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    return "aac" if _is_frame(data, 0xF6, 0xF0) else ""


def _is_frame(data: bytes, mask: int, bits: int) -> bool:
    """Whether a file begins with a frame of MPEG audio, whose second byte has ``bits`` below ``mask``."""
    return len(data) > 1 and data[0] == 0xFF and data[1] & mask == bits


def _decode_file(data: bytes, seconds: int, name: str, row: int) -> tuple[Samples, int]:
    """Return the mono samples of a file that soundfile reads, and their sampling rate (Hz)."""
    soundfile = extras.load("reading sound", "soundfile")
    try:
        with soundfile.SoundFile(BytesIO(data)) as file:
            seconds = _check_sound(file.samplerate, file.channels, seconds, name, row)
            if file.frames >= _UNKNOWN:
                raise _broken(name, row, "its header does not contain its length; write it to a file, not to a pipe")
            if file.frames > seconds * file.samplerate:
                raise _too_long(name, row, file.frames / file.samplerate, seconds)
            return _mono(_blocks(file), file.samplerate, seconds, name, row), file.samplerate
    except soundfile.SoundFileError as error:
        # Omit the file name: it is the repr of an object in memory.
        raise _broken(name, row, str(getattr(error, "error_string", error)).rstrip(".")) from error


def _blocks(file: Any) -> Iterator[Samples]:
    while (block := file.read(_BLOCK // file.channels, "float32", always_2d=True)).size:
        yield block


def _decode_container(data: bytes, container: str, seconds: int, name: str, row: int) -> tuple[Samples, int]:
    """Return the mono samples of the first audio stream of a file that FFmpeg reads, and their sampling rate (Hz)."""
    av = extras.load("reading M4A, WebM and AAC files", "av")
    try:
        with av.open(BytesIO(data), format=container, metadata_errors="ignore") as file:
            if not file.streams.audio:
                raise _broken(name, row, "it has no sound")
            codec = file.streams.audio[0].codec_context
            if codec is None or codec.name not in _CODECS:
                raise _broken(name, row, f"its sound is encoded as {codec.name if codec else 'an unknown codec'}")
            codec.thread_count = 1
            frames = file.decode(file.streams.audio[0])
            first = next(frames, None)
            if first is None:
                raise _broken(name, row, "it contains no samples")
            rate = first.sample_rate
            seconds = _check_sound(rate, first.layout.nb_channels, seconds, name, row)
            converter = av.AudioResampler(format="fltp", layout=first.layout, rate=rate)
            blocks = (
                converted.to_ndarray().T
                for frame in chain([first], frames, [None])
                for converted in converter.resample(frame)
            )
            return _mono(blocks, rate, seconds, name, row), rate
    except (av.FFmpegError, ValueError, EOFError) as error:
        raise _broken(name, row, getattr(error, "strerror", None) or one_line(error)) from error


def _check_sound(rate: int, channels: int, seconds: int, name: str, row: int) -> int:
    """Return the maximum length of a recording at this rate, at most ``seconds``."""
    _check_rate(rate, name, row)
    if channels > MAX_CHANNELS:
        raise _broken(name, row, f"it has {channels} channels; at most {MAX_CHANNELS} are read")
    return min(seconds, seconds * _USUAL_RATE // rate)


def _mono(blocks: Iterable[Samples], rate: int, seconds: int, name: str, row: int) -> Samples:
    """Join blocks ``[samples, channels]`` of a file, whose header may be wrong: the length is checked while reading."""
    averaged, read = [], 0
    for block in blocks:
        averaged.append(block.mean(axis=1))
        read += len(block)
        if read > seconds * rate:
            raise _too_long(name, row, read / rate, seconds)
    return np.concatenate(averaged) if averaged else np.zeros(0, np.float32)


def samples(values: Samples, source_rate: int, rate: int, *, seconds: int = MAX_SECONDS, row: int = 0) -> Samples:
    """Convert mono samples from ``source_rate`` Hz to ``rate`` Hz, both ``[samples]``.

    Raises INVALID_ARG for an unsupported rate, no samples, samples that are not finite, or more than ``seconds``.
    """
    _check_rate(source_rate, "samples", row)
    if len(values) > seconds * source_rate:
        raise _too_long("samples", row, len(values) / source_rate, seconds)
    return resample(_checked(values, "samples", row), source_rate, rate)


def resample(values: Samples, source_rate: int, rate: int) -> Samples:
    """Resample from ``source_rate`` Hz to ``rate`` Hz with a polyphase filter."""
    if source_rate == rate or not len(values):
        return values
    resample_poly = extras.load(f"audio at {source_rate} Hz for a model of {rate} Hz", "scipy.signal").resample_poly
    divisor = int(np.gcd(source_rate, rate))
    resampled: Samples = resample_poly(values, rate // divisor, source_rate // divisor).astype(np.float32, copy=False)
    return resampled


def image(data: bytes, *, pixels: int = MAX_PIXELS, name: str = "image", row: int = 0) -> Image:
    """Decode the first frame of a PNG, JPEG, WebP, GIF or BMP file to an upright RGB image.

    Raises INVALID_ARG, naming the input and the row, for a file in another format or one that is damaged or too large.
    """
    extras.require("reading images", "PIL")
    from PIL import Image as pillow
    from PIL import ImageOps, UnidentifiedImageError

    data = file_bytes(data, name, row)
    try:
        with pillow.open(BytesIO(data), formats=_IMAGE_FORMATS) as file:
            if file.width * file.height > pixels:
                raise _too_large(name, row, f"{file.width}x{file.height}", pixels)
            if max(file.size) > _MAX_ASPECT * min(file.size):
                raise _broken(
                    name,
                    row,
                    f"it is {file.width}x{file.height}; one side may be at most {_MAX_ASPECT} times the other",
                )
            return ImageOps.exif_transpose(file).convert("RGB")
    except ConchError:
        raise
    except UnidentifiedImageError:
        raise _broken(name, row, f"it is not an image ({', '.join(_IMAGE_FORMATS)})") from None
    except pillow.DecompressionBombError:
        raise _too_large(name, row, "too many", pixels) from None
    except Exception as error:
        # Pillow's decoders raise many types: OSError, SyntaxError, struct.error, ValueError ...
        raise _broken(name, row, str(error) or type(error).__name__) from error


def images(files: Sequence[bytes], *, pixels: int, per_row: int = 1) -> list[Image]:
    """Decode several files with :func:`image`; each row has ``per_row`` images.

    Raises INVALID_ARG if an image has more than ``pixels`` pixels, or all together more than ``TOGETHER`` times that.
    """
    pictures, together = [], 0
    for index, data in enumerate(files):
        pictures.append(image(data, pixels=pixels, row=index // per_row))
        together += pictures[-1].width * pictures[-1].height
        if together > TOGETHER * pixels:
            raise invalid(
                f"the images of the request have more than {TOGETHER * pixels} pixels together ({TOGETHER} times "
                "parameter 'max_image_pixels'): send them in several requests"
            )
    return pictures


def example_sound(rate: int, min_samples: int) -> Samples:
    """Return a second of noise at ``rate`` Hz, or ``min_samples`` samples if that is longer."""
    return np.random.default_rng(0).uniform(-0.5, 0.5, max(rate, min_samples)).astype(np.float32)


def example_image() -> Image:
    """Return a small landscape image of noise."""
    pillow = extras.load("reading images", "PIL.Image")
    return pillow.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8))


def png(picture: Any) -> bytes:
    """Encode a PIL image as a PNG file."""
    file = BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def wav(values: npt.NDArray[Any], rate: int) -> bytes:
    """Encode samples between -1 and 1, ``[samples]`` or ``[channels, samples]``, as a 16-bit WAV file."""
    soundfile = extras.load("writing sound", "soundfile")
    file = BytesIO()
    soundfile.write(file, np.squeeze(values).T.astype(np.float32), rate, "PCM_16", format="WAV")
    return file.getvalue()


def _check_rate(rate: int, name: str, row: int) -> None:
    if not RATES[0] <= rate <= RATES[1]:
        raise _broken(name, row, f"its sampling rate is {rate} Hz; between {RATES[0]} and {RATES[1]} are read")


def _checked(values: Samples, name: str, row: int) -> Samples:
    if not len(values):
        raise _broken(name, row, "it contains no samples")
    if not np.isfinite(values).all():
        raise _broken(name, row, "it contains samples that are not finite numbers")
    return values


def _too_long(name: str, row: int, length: float, seconds: int) -> ConchError:
    return _broken(
        name, row, f"it is {length:.0f} seconds long; at most {seconds} are read (parameter 'max_audio_seconds')"
    )


def _too_large(name: str, row: int, size: str, pixels: int) -> ConchError:
    return _broken(name, row, f"it has {size} pixels; at most {pixels} are read (parameter 'max_image_pixels')")


def _broken(name: str, row: int, reason: str) -> ConchError:
    return invalid(f"input '{name}' in row {row} cannot be read: {reason}")
