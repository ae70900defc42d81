"""Standing servers still, by real signals to real processes; and the closed loop of requests."""

import asyncio
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu import arms
from tests.gpu.load import ClosedLoop, prompt
from tests.gpu.servers import Server, processes_of_session
from tests.gpu.session import free_ports
from tests.gpu.stages import meaning
from tests.gpu.stages.features import middle_of

# A launcher whose child has left its process group, as some of an engine's processes do.
FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import os, time; os.setpgid(0, 0); time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def family(tmp_path):
    """A server of two processes."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    child = int(launcher.stdout.readline())
    log = tmp_path / "server.log"
    log.write_text("")
    launched = {"attempt": 1, "pid": launcher.pid, "url": "http://127.0.0.1:1", "log": str(log)}
    server = Server(arms.all_arms()["a-base"], launched, arms.VOCABULARY)
    _until(lambda: _stat(child)[4] == str(child))
    yield server, launcher, child
    server.signal(signal.SIGCONT)
    server.signal(signal.SIGKILL)
    launcher.wait()
    launcher.stdout.close()


def _stat(pid):
    text = Path(f"/proc/{pid}/stat").read_text()
    return [str(pid), "", *text[text.rindex(")") + 2 :].split()]


def _until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_paused_server_stands_still_with_all_its_processes(family):
    """Also those that left the process group; and all go on again after it."""
    server, launcher, child = family
    assert {launcher.pid, child} == set(processes_of_session(launcher.pid))
    server.pause()
    _until(lambda: ["T", "T"] == [_stat(launcher.pid)[2], _stat(child)[2]])
    with server.running():
        _until(lambda: "T" not in (_stat(launcher.pid)[2], _stat(child)[2]))
    _until(lambda: ["T", "T"] == [_stat(launcher.pid)[2], _stat(child)[2]])


def test_a_zombie_is_not_alive(family):
    """What has ended and was not reaped yet neither serves nor holds a GPU."""
    server, launcher, _child = family
    assert server.alive()
    server.signal(signal.SIGKILL)
    _until(lambda: _stat(launcher.pid)[2] == "Z")
    assert not server.alive()
    _until(lambda: processes_of_session(launcher.pid) == [])


def test_ports_that_are_taken_are_passed_over():
    """The whole row moves on."""
    first = free_ports()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", first + arms.PORTS_OF_AN_ARM))
        listener.listen()
        assert free_ports() > first + arms.PORTS_OF_AN_ARM
    assert first == free_ports()


def test_a_closed_loop_is_as_wide_as_it_is_told():
    """Workers above the width send nothing; those below one request after another."""

    async def run():
        running, most, workers = 0, 0, set()

        async def one(worker, _rounds):
            nonlocal running, most
            running += 1
            most = max(most, running)
            workers.add(worker)
            await asyncio.sleep(0.001)
            running -= 1

        async with ClosedLoop(one, most=8) as loop:
            loop.width = 3
            await asyncio.sleep(0.1)
        return most, workers, loop.failures

    assert (3, {0, 1, 2}, []) == asyncio.run(run())


def test_a_request_that_fails_ends_the_loop_and_is_kept():
    """The others are not asked on against a server that is broken."""

    async def run():
        asked = []

        async def one(worker, rounds):
            asked.append((worker, rounds))
            raise ValueError("broken")

        async with ClosedLoop(one, most=1) as loop:
            loop.width = 1
            await asyncio.sleep(0.1)
        return asked, loop.failures

    assert ([(0, 0)], ["ValueError: broken"]) == asyncio.run(run())


def test_prompts_are_the_same_every_time_and_differ_from_each_other():
    """References of one server are compared with answers of another."""
    assert prompt(3) == prompt(3)
    assert prompt(3) != prompt(4)
    assert {64} == {len(prompt(number)) for number in range(20)}


def test_long_prompts_share_their_beginnings_in_pairs():
    """So that the second of each pair hits the radix cache."""
    prompts = meaning.prompts_of(arms.all_arms()["b-v1-dynamic-radix"])
    assert prompts[4][:300] == prompts[5][:300]
    assert prompts[4][300:] != prompts[5][300:]
    assert prompts[4][:300] != prompts[6][:300]
    assert len(prompts) == len({tuple(ids) for ids in prompts})


def test_a_stop_string_is_plain_text_from_the_middle():
    """Bytes that are no text would not survive the way to the server and back."""
    assert " w303" == middle_of(" w300 w301 w302 w303 w304 w305"[:30])
    assert "abcde" == middle_of("0123456789\ufffd\ufffdabcdefgh")
    with pytest.raises(ValueError, match="nothing to stop at"):
        middle_of("\ufffd" * 40)
