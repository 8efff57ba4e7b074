"""Pictures and sounds for requests, with realistic sizes in pixels, seconds and bytes.

Writes PNG and WAV itself, without media libraries.  Pure.
"""

from __future__ import annotations

import io
import wave
import zlib
from struct import pack
from typing import Final

import numpy as np

#: Width and height of pictures (pixels), one after another.
PICTURE_SIZES: Final = ((224, 224), (320, 240), (640, 480), (480, 640))
#: Lengths of sounds (s), one after another.
SOUND_SECONDS: Final = (2, 4, 8, 15)
SAMPLING_RATE: Final = 16_000
#: Cells of a picture's smooth part, from one side to the other.
_CELLS: Final = 9
#: Resonances of vowels (Hz), from those of "father", "see", "moon", "bed" and "law".
_VOWELS: Final = ((730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480), (570, 840, 2410))
#: The width of a resonance (Hz), and the length of a syllable (s).
_WIDTH: Final = 90.0
_SYLLABLE: Final = 0.22


def picture(width: int, height: int, random: np.random.Generator) -> bytes:
    """A PNG file with soft areas of colour and grain, as photographs have them: about a byte for a pixel."""
    rows, columns = (np.linspace(0, _CELLS - 1, size) for size in (height, width))
    smooth = _resized(random.random((_CELLS, _CELLS, 3)) * 255, rows, columns)
    grain = np.rint(random.normal(0, 1.0, (height, width, 1)))
    pixels = np.clip(smooth + grain, 0, 255).astype(np.uint8)
    # Each row is preceded by its filter: 1, the difference from the pixel to the left.
    left = np.zeros_like(pixels)
    left[:, 1:] = pixels[:, :-1]
    filtered = (pixels - left).reshape(height, -1)
    body = zlib.compress(np.insert(filtered, 0, 1, axis=1).tobytes(), 1)
    header = pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (_chunk(kind, data) for kind, data in ((b"IHDR", header), (b"IDAT", body), (b"IEND", b"")))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def sound(seconds: float, random: np.random.Generator) -> bytes:
    """A WAV file of one channel: syllables of vowels at a changing pitch, with pauses.  It has no words."""
    count = round(seconds * SAMPLING_RATE)
    samples = np.zeros(count)
    start = 0
    while start < count:
        length = min(count - start, round(_SYLLABLE * SAMPLING_RATE * random.uniform(0.6, 1.4)))
        if random.random() > 0.15:
            samples[start : start + length] = _syllable(length, random)
        start += length
    samples += random.normal(0, 0.002, count)
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(SAMPLING_RATE)
        written.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return file.getvalue()


def _resized(grid: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """``grid`` [cells, cells, 3] between its points, linearly, at ``rows`` and ``columns``."""
    top, left = rows.astype(int).clip(0, _CELLS - 2), columns.astype(int).clip(0, _CELLS - 2)
    down, right = (rows - top)[:, None, None], (columns - left)[None, :, None]
    across = grid[:, left] * (1 - right) + grid[:, left + 1] * right
    found: np.ndarray = across[top] * (1 - down) + across[top + 1] * down
    return found


def _syllable(length: int, random: np.random.Generator) -> np.ndarray:
    """A vowel of ``length`` samples: harmonics of a voice, as loud as its resonances make them."""
    pitch = random.uniform(95, 220)
    harmonics = pitch * np.arange(1, int(4000 / pitch))
    resonances = np.array(_VOWELS[random.integers(len(_VOWELS))])
    loudness = (1 / (1 + ((harmonics[:, None] - resonances) / _WIDTH) ** 2)).sum(axis=1) / np.sqrt(harmonics)
    moments = np.arange(length) / SAMPLING_RATE
    voice = (loudness[:, None] * np.sin(2 * np.pi * harmonics[:, None] * moments)).sum(axis=0)
    swell = np.sin(np.linspace(0, np.pi, length)).clip(0) ** 0.5
    found: np.ndarray = 0.3 * swell * voice / (np.abs(voice).max() or 1.0)
    return found


def _chunk(kind: bytes, data: bytes) -> bytes:
    return pack(">I", len(data)) + kind + data + pack(">I", zlib.crc32(kind + data))
