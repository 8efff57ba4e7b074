"""Regions of system shared memory: what may be one, and clients that take it away again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conch.core.errors import Code, ConchError
from conch.server.regions import SystemRegion
from tests.open_files import times_open
from tests.refusals import refused

PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """A folder as the system's, with two pages of shared memory named ``mine``."""
    (tmp_path / "mine").write_bytes(bytes(range(256)) * (2 * PAGE // 256))
    return tmp_path


def opened(memory: Path, key: str, offset: int = 0, size: int = PAGE) -> SystemRegion:
    return SystemRegion("r", key, offset, size, memory)


def read(region: SystemRegion, offset: int, size: int) -> bytes:
    data = bytearray(size)
    region.read_into(offset, memoryview(data))
    return bytes(data)


def refusal(memory: Path, key: str, offset: int = 0, size: int = PAGE) -> tuple[Code, str]:
    error = refused(opened, memory, key, offset, size)
    return error.code, error.message


@pytest.mark.parametrize("key", ["mine", "/mine", "///mine"])
def test_a_region_is_what_its_file_holds(memory: Path, key: str) -> None:
    region = opened(memory, key, PAGE)
    assert read(region, 1, 3) == b"\x01\x02\x03"
    region.write(2, b"new")
    assert (memory / "mine").read_bytes()[PAGE + 2 : PAGE + 5] == b"new"
    assert region.status == {"name": "r", "key": key, "offset": PAGE, "byte_size": PAGE}


@pytest.mark.parametrize("key", ["", "/", "absent", ".", "..", "../mine", "folder/mine", "folder", "a\0b", "x" * 300])
def test_a_key_of_no_shared_memory_is_refused(memory: Path, key: str) -> None:
    (memory / "folder").mkdir()
    (memory / "folder" / "mine").write_bytes(bytes(PAGE))
    assert refusal(memory, key) == (Code.INTERNAL, f"Unable to open shared memory region: '{key}'")


def test_links_and_pipes_are_no_regions(memory: Path) -> None:
    (memory / "symbolic").symlink_to(memory / "mine")
    os.link(memory / "mine", memory / "hard")
    os.mkfifo(memory / "pipe")
    for key in ("symbolic", "hard", "mine", "pipe"):
        assert refusal(memory, key) == (Code.INTERNAL, f"Unable to open shared memory region: '{key}'")


@pytest.mark.parametrize(
    ("offset", "size", "text"),
    [
        (0, 2 * PAGE + 1, "invalid args"),
        (PAGE, PAGE + 1, "invalid args"),
        (2**62, 4, "invalid args"),
        (0, 2**64 - 1, "invalid args"),
        (100, 100, "unable to process address spaceInvalid argument"),
        (0, 0, "unable to process address spaceInvalid argument"),
    ],
)
def test_a_part_that_does_not_exist_is_refused_in_tritons_words(
    memory: Path, offset: int, size: int, text: str
) -> None:
    expected = f"failed to register shared memory region 'r': {text}"
    assert refusal(memory, "mine", offset, size) == (Code.INVALID_ARG, expected)


def test_names_of_tritons_own_memory_are_refused(memory: Path) -> None:
    key = "//triton_python_backend_shm_region_1"
    assert refusal(memory, key) == (
        Code.INVALID_ARG,
        f"cannot register shared memory region 'r' with key '{key}' as the key contains the reserved prefix"
        " 'triton_python_backend_shm_region_'",
    )


def test_a_region_outlives_its_name(memory: Path) -> None:
    region = opened(memory, "mine")
    (memory / "mine").unlink()
    region.write(0, b"kept")
    assert read(region, 0, 4) == b"kept"


def test_a_region_that_its_client_has_shortened_is_an_error_and_grows_no_more(memory: Path) -> None:
    region = opened(memory, "mine")
    os.truncate(memory / "mine", 100)
    for use in (lambda: read(region, 50, 51), lambda: region.write(50, bytes(51))):
        with pytest.raises(ConchError) as caught:
            use()
        assert caught.value.code is Code.INVALID_ARG
        assert caught.value.message == "shared memory region 'r' has become smaller than when it was registered"
    assert (memory / "mine").stat().st_size == 100
    assert read(region, 50, 50)


def test_the_descriptor_goes_with_the_region(memory: Path) -> None:
    region = opened(memory, "mine")
    assert times_open(memory / "mine") == 1
    del region
    for _ in range(3):
        refusal(memory, "mine", 0, 10 * PAGE)
    assert times_open(memory / "mine") == 0
