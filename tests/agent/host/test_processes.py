"""Processes of this machine and of others: other users', stopped, refused, without /proc."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from launch_host import until

from deployctl.agent import processes

OTHER = 54321


@contextlib.contextmanager
def as_user(uid):
    """This process with the rights of another user."""
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


@contextlib.contextmanager
def running(*argv, **options):
    """A process, seen by the agent; ended and reaped afterwards."""
    child = subprocess.Popen(argv or ("sleep", "300"), **options)
    try:
        yield until(lambda: processes.snapshot([child.pid]).get(child.pid), "the process")
    finally:
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                stream.close()


def test_a_user_without_a_name():
    """Containers run as numbers."""
    with running("sleep", "300", user=OTHER) as found:
        assert str(OTHER) == found.user


def test_another_users_process_is_a_survivor_at_once():
    """Refused is refused: nobody waits for a minute, and it is named."""
    with running("sleep", "300", user=1234) as theirs, running("sleep", "300", user=OTHER) as mine:
        began = time.monotonic()
        with as_user(OTHER):
            left = processes.end([theirs, mine], 60, 60)
        assert [theirs.pid] == [process.pid for process in left]
        assert time.monotonic() - began < 50
        assert processes.alive(theirs.pid, theirs.start)
        assert not processes.alive(mine.pid, mine.start)


def test_a_stopped_process_is_ended():
    """It takes no SIGTERM: SIGKILL after the grace."""
    with running() as found:
        os.kill(found.pid, signal.SIGSTOP)
        until(lambda: processes.snapshot([found.pid])[found.pid].state == "T", "the stop")
        assert [] == processes.end([found], 0.1, 10)


def test_what_survives_is_told_as_it_is_now(monkeypatch):
    """Its state may say why."""
    with running() as found:
        monkeypatch.setattr(processes, "send", lambda _process, _number: os.kill(found.pid, signal.SIGSTOP))
        left = processes.end([found], 0.05, 0.05)
        assert [(found.pid, "T")] == [(process.pid, process.state) for process in left]


def test_a_process_that_ends_at_that_very_moment(monkeypatch):
    """Between the look and the signal: gone is what was wanted."""
    with running() as found:

        def gone(*_):
            raise ProcessLookupError

        monkeypatch.setattr(os, "kill", gone)
        assert processes.send(found, signal.SIGTERM) is False
        monkeypatch.undo()


def test_other_users_marks_cannot_be_read():
    """They are not found, and that is no error."""
    with running("sleep", "300", user=1234, env={"DEPLOYCTL_ATTEMPT": "other-user:1"}) as found:
        assert [(found.pid, "other-user:1")] == [(p.pid, value) for p, value in processes.marked("other-user:")]
        with as_user(OTHER):
            assert [] == processes.marked("other-user:")


def test_a_port_that_another_user_holds():
    """Taken, by nobody that can be named."""
    code = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    child = [sys.executable, "-c", code]
    with subprocess.Popen(child, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as held:
        port = int(held.stdout.readline())
        assert held.pid == processes.listening(port)[0].pid
        with as_user(OTHER):
            assert (None, True) == processes.listening(port)
        held.stdin.close()


def test_a_listener_on_ipv6():
    """The other table."""
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        holder, known = processes.listening(listener.getsockname()[1])
    assert (os.getpid(), True) == (holder.pid, known)


def test_descendants_over_generations():
    """Children, theirs, and nobody else; a circle, as a snapshot of coming and going processes may hold, ends."""
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '300']); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        grandchild = int(parent.stdout.readline())
        assert {parent.pid, grandchild} <= {process.pid for process in processes.descendants(os.getpid())}
        family = processes.descendants(parent.pid)
        assert [grandchild] == [process.pid for process in family]
        os.kill(grandchild, signal.SIGKILL)
    one = family[0]
    circle = {1000: one._replace(pid=1000, ppid=1001), 1001: one._replace(pid=1001, ppid=1000)}
    assert [1001] == [process.pid for process in processes.descendants(1000, circle)]


def test_processes_that_come_and_go_are_read_without_error():
    """Hundreds end while they are looked at."""
    script = "i=0; while [ $i -lt 400 ]; do true & i=$((i+1)); done; wait"
    with subprocess.Popen(["/bin/sh", "-c", script]) as storm:
        while storm.poll() is None:
            assert os.getpid() in processes.snapshot()
            processes.marked("nobody:")


@pytest.fixture
def macos(tmp_path, monkeypatch):
    """No /proc; `ps` and `lsof` answer as they do on macOS."""
    monkeypatch.setattr(processes, "_LINUX", False)
    tools = tmp_path / "bin"
    tools.mkdir()

    def tool(name, text):
        (tools / name).write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        (tools / name).chmod(0o755)

    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    return tool


PS = """    1     0     1 Ss   root     10-02:03:04 Mon Dec  1 00:00:00 2025 /sbin/launchd
  501     1   501 S    ann            01:05 Mon Dec  1 02:00:00 2025 python -m sglang.launch_server --port 30000
  502   501   501 Z    ann            01:04 Mon Dec  1 02:00:01 2025 (python)
  503   501   501 U+   ann         02:00:00 Mon  1 Dec 00:00:02 2025 a name with  spaces
not a process"""


def test_macos_processes(macos):
    """Times to the second, zombies left out, names with spaces kept."""
    macos("ps", PS)
    found = processes.snapshot()
    assert [1, 501, 503] == sorted(found)
    assert (65.0, "ann", "python -m sglang.launch_server --port 30000", "S") == (
        found[501].age_s,
        found[501].user,
        found[501].command,
        found[501].state,
    )
    assert (7200.0, "a name with  spaces") == (found[503].age_s, found[503].command)
    assert 10 * 86400 + 2 * 3600 + 3 * 60 + 4 == found[1].age_s
    assert processes.alive(501, "Mon Dec  1 02:00:00 2025")
    assert not processes.alive(501, "Mon Dec  1 02:00:09 2025")


def test_macos_marks_and_listeners(macos, monkeypatch):
    """From `ps -E` and `lsof`."""
    macos("ps", PS.splitlines()[1])
    macos("lsof", "501")
    holder, known = processes.listening(30000)
    assert (501, True) == (holder.pid, known)
    macos("ps", PS)
    everyone = processes.snapshot()
    monkeypatch.setattr(processes, "snapshot", lambda _pids=None: dict(everyone))
    macos(
        "ps",
        "  501 python -m x HOME=/u DEPLOYCTL_ATTEMPT=abc:3 A=b\n  503 other DEPLOYCTL_ATTEMPT=zzz:1\n  999 gone DEPLOYCTL_ATTEMPT=abc:9",
    )
    assert [(501, "abc:3")] == [(process.pid, value) for process, value in processes.marked("abc:")]
