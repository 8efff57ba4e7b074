"""Processes of workers whose ends others notice first."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from conch.workers.host.spawn import SpawnedProcess


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="elsewhere the end is noticed when it is killed")
async def test_process_that_the_host_program_has_waited_for_can_be_killed_and_has_ended() -> None:
    popen = subprocess.Popen([sys.executable, "-c", ""])
    ended = asyncio.Event()
    process = SpawnedProcess(popen.pid, popen.wait, None, ended.set)
    os.waitpid(popen.pid, 0)  # as programs do that look after all of their children
    process.kill()
    await asyncio.wait_for(ended.wait(), 60)
    assert process.exit_status is not None
