"""Programs of the user are bounded in time and output, and leave nothing of their process group behind."""

import os
import signal
import sys
import threading
import time

import pytest
from pythons import context_for
from support import MemoryWire

from deployctl.agent import script
from deployctl.agent.failure import Cancelled, Failure

PYTHON = sys.executable


def run(program, tmp_path, timeout_s=60.0, wire=None):
    context = context_for(PYTHON, wire=wire)
    status, tail = script.run(context, [PYTHON, "-c", program], str(tmp_path), dict(os.environ), timeout_s, "it")
    return status, tail, "".join(event["text"] for event in context.wire.events if event["event"] == "output")


def wait_for(condition, deadline_s=20.0):
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def lives(pid):
    """Whether a process runs; an unreaped corpse does not."""
    try:
        with open(f"/proc/{pid}/stat") as source:
            return source.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_output_status_and_surroundings(tmp_path):
    """stdout and stderr in order, the exit status, the directory and the environment; stdin is empty; own session."""
    program = (
        "import os, sys\n"
        "print('out', flush=True); print('err', file=sys.stderr, flush=True)\n"
        "print(os.getcwd(), repr(sys.stdin.read()), os.getsid(0) == os.getpid())\n"
        "sys.exit(3)\n"
    )
    status, tail, shown = run(program, tmp_path)
    assert (3, f"out\nerr\n{tmp_path} '' True\n") == (status, tail)
    assert tail == shown


def test_several_megabytes_do_not_hang_and_are_bounded(tmp_path):
    """3 MB of output: the end is kept, the events stop at their bound and say so."""
    status, tail, shown = run("print('x' * 3_000_000); print('the end')", tmp_path)
    assert 0 == status
    assert tail.endswith("x\nthe end\n")
    assert script.TAIL_BYTES == len(tail)
    assert shown.startswith("x" * script.EVENT_BYTES)
    assert shown.endswith("more output; its end is in the result]\n")
    assert len(shown) < script.EVENT_BYTES + 100


def test_characters_cut_between_reads_stay_whole(tmp_path):
    """A character written in two halves is shown as one; undecodable bytes are escaped; so is half a one at the end."""
    program = (
        "import os, time\n"
        "os.write(1, b'a\\xc3'); time.sleep(0.2); os.write(1, b'\\xa9 \\xff '); time.sleep(0.2); os.write(1, b'\\xe2')"
    )
    _, tail, shown = run(program, tmp_path)
    assert "aé \\xff \\xe2" == tail == shown


def test_the_tail_begins_with_a_whole_character(tmp_path):
    """The tail is cut at a character."""
    _, tail, _ = run("import os; os.write(1, '€'.encode() * 10000 + b'!!')", tmp_path)
    assert "€" * 5460 + "!!" == tail


def test_ended_by_a_signal_is_named(tmp_path):
    """A program ended by a signal is not one that ended with a status."""
    status, _, _ = run("import os; os.kill(os.getpid(), 9)", tmp_path)
    assert -9 == status
    assert ["signal SIGKILL", "exit status 3", "signal 99"] == [script.describe(each) for each in (-9, 3, -99)]


def test_a_background_child_does_not_hang_it_and_is_ended(tmp_path):
    """A child that keeps the pipe open after the program's end holds nothing up, and does not outlive it."""
    child = f"import subprocess, sys; p = subprocess.Popen([{PYTHON!r}, '-c', 'import time; time.sleep(600)']); print(p.pid)"
    status, tail, _ = run(child, tmp_path)
    assert 0 == status
    wait_for(lambda: not lives(int(tail)))


def test_a_child_that_ignores_the_polite_signal_is_ended_too(tmp_path):
    """SIGTERM is ignored by the child: SIGKILL ends it."""
    grandchild = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
    program = (
        "import subprocess\n"
        f"p = subprocess.Popen([{PYTHON!r}, '-c', {grandchild!r}], stdout=subprocess.PIPE)\n"
        "p.stdout.readline(); print(p.pid)\n"
    )
    _, tail, _ = run(program, tmp_path)
    wait_for(lambda: not lives(int(tail)))


def test_closing_its_output_early_is_not_its_end(tmp_path):
    """A program that closes stdout and stderr is waited for."""
    status, _, _ = run("import os, time; os.close(1); os.close(2); time.sleep(0.3); os._exit(7)", tmp_path)
    assert 7 == status


def test_the_deadline_ends_the_whole_group(tmp_path):
    """Past its deadline program and child are ended, also where the program ignores SIGTERM; the output is kept."""
    program = (
        "import os, signal, subprocess, time\n"
        f"p = subprocess.Popen([{PYTHON!r}, '-c', 'import time; time.sleep(600)'])\n"
        "print(os.getpid(), p.pid, flush=True)\n"
        "while True: time.sleep(1)\n"
    )
    with pytest.raises(Failure) as caught:
        run(program, tmp_path, timeout_s=1.5)
    assert ("timeout", "it did not end within 1.5 s") == (caught.value.kind, caught.value.message)
    for pid in caught.value.fields["output"].split():
        wait_for(lambda pid=int(pid): not lives(pid))


def test_cancelling_ends_it(tmp_path):
    """When the client goes away the program is ended, whatever it does."""
    wire = MemoryWire()

    def cancel():
        wait_for(lambda: wire.events)
        wire.cancelled.set()

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(Cancelled) as caught:
        run("import os, time; print(os.getpid(), flush=True); time.sleep(600)", tmp_path, wire=wire)
    thread.join()
    assert 130 == caught.value.exit_code
    assert not lives(int(caught.value.fields["output"]))


@pytest.mark.parametrize(
    ("argv", "cwd", "named"),
    [
        (["/nowhere/program"], ".", "/nowhere/program"),
        ([PYTHON], "/nowhere/folder", "/nowhere/folder"),
        ([PYTHON, "nul\0byte"], ".", "null byte"),
    ],
)
def test_what_cannot_be_started_is_named(argv, cwd, named):
    """The missing program or directory is named, and nothing stays open."""
    before = os.listdir("/proc/self/fd")
    with pytest.raises(Failure) as caught:
        script.run(context_for(PYTHON), argv, cwd, dict(os.environ), 5.0, "it")
    assert "cannot-run" == caught.value.kind
    assert named in caught.value.message
    assert before == os.listdir("/proc/self/fd")


def test_nothing_stays_open(tmp_path):
    """Descriptors are closed after every run."""
    before = os.listdir("/proc/self/fd")
    run("print(1)", tmp_path)
    assert before == os.listdir("/proc/self/fd")


def test_what_survives_sigkill_is_reported(monkeypatch):
    """A process that hangs in the kernel is named with its pid (here: one that nobody may signal any more)."""
    monkeypatch.setattr(script, "_KILL_PATIENCE_S", 0.1)
    process = script.start([PYTHON, "-c", "import time; time.sleep(600)"], ".", dict(os.environ), "it")
    group = os.getpgid(process.pid)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "killpg", lambda *_: (_ for _ in ()).throw(PermissionError()))
            with pytest.raises(Failure, match=f"process {process.pid} does not end"):
                script.end_group(process)
    finally:
        os.killpg(group, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def test_the_end_of_a_flood_is_not_waited_for(tmp_path):
    """A background child that prints for ever does not hold up the end of the program."""
    flood = "while True: print('y' * 1000)"
    program = f"import subprocess; subprocess.Popen([{PYTHON!r}, '-c', {flood!r}])"
    status, _, _ = run(program, tmp_path)
    assert 0 == status


def test_crlf_script_runs(tmp_path):
    """A script with CRLF line ends runs as with LF: the interpreter is named explicitly."""
    path = tmp_path / "v 3.py"
    path.write_bytes(b"#!/usr/bin/env python3\r\nimport sys\r\nif True:\r\n    print(len(sys.argv))\r\n")
    context = context_for(PYTHON)
    assert (0, "1\n") == script.run(context, [PYTHON, str(path)], str(tmp_path), dict(os.environ), 20.0, "it")


def test_a_pipeline_of_a_shell_is_judged_by_the_shell(tmp_path):
    """A step's own exit status counts."""
    context = context_for(PYTHON)
    argv = ["sh", "-c", "false; exit $?"]
    assert 1 == script.run(context, argv, str(tmp_path), dict(os.environ), 20.0, "it")[0]
