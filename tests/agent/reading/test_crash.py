"""Crash diagnosis on logs that real engines wrote, and on those that are known from reports."""

from pathlib import Path

import pytest
from support import Box, edit

from deployctl.agent import attribution, crash, processes, releases
from deployctl.agent.state import State

CAPTURED = Path(__file__).resolve().parents[2] / "engine" / "env" / "captured"
STAMP = "[2026-01-31 14:00:00 TP0] "


def scanned(text):
    scanner = crash.CrashScanner()
    for line in crash.split(text.encode() if isinstance(text, str) else text):
        scanner.feed(line)
    return scanner


def cause(text):
    found = scanned(text).cause()
    return found[0] if found else None


@pytest.mark.parametrize(
    ("name", "expected", "terminal"),
    [
        ("run-time-crash", "AttributeError: 'Scheduler' object has no attribute 'spec_disabled_batches'", True),
        ("argument-error", "sglang serve: error: unrecognized arguments:", False),
        ("port-in-use", "[Errno 98] error while attempting to bind on address", True),
        ("scheduler-killed", "Subprocess scheduler_0 (pid=", True),
        ("port-too-high", "ValueError:", False),
        ("normal", None, False),
        ("sigterm", None, False),
    ],
)
def test_logs_that_the_real_engine_wrote(name, expected, terminal):
    """Captured from SGLang 0.5.12 on the CPU."""
    scanner = crash.scan_log(CAPTURED / f"{name}.log")
    found = scanner.cause()
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert expected in found[0]
    assert (scanner.terminal is not None) == terminal


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "launch_server.py: error: unrecognized arguments: --x",
            "launch_server.py: error: unrecognized arguments: --x",
        ),
        (
            STAMP + "Not enough memory. Please try to increase --mem-fraction-static.",
            "Not enough memory. Please try to increase --mem-fraction-static.",
        ),
        ("Fatal Python error: Segmentation fault", "Fatal Python error: Segmentation fault"),
        (
            STAMP + "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)",
            "Scheduler watchdog timeout",
        ),
        (
            "Rank 0 scheduler is dead. Please check if there are relevant logs.\nExit code: -9",
            "Rank 0 scheduler is dead",
        ),
        ("/usr/bin/python3: No module named sglang", "/usr/bin/python3: No module named sglang"),
        ("nothing of note", None),
    ],
)
def test_single_lines(text, expected):
    """Causes without a traceback."""
    found = cause(text)
    assert found is None if expected is None else found.startswith(expected)


def test_the_first_rank_decides_and_secondary_errors_do_not():
    """Rank 1's NCCL error after rank 0's own exception is an echo."""
    text = (
        "[2026-01-31 14:00:00 TP1] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "/e/a.py", line 1, in f\n    x()\n    ^^^\nValueError: first\n\n'
        "[2026-01-31 14:00:01 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "/e/b.py", line 2, in g\ntorch.distributed.DistBackendError: NCCL error\n'
    )
    found = scanned(text).cause()
    assert found[0] == "ValueError: first"
    assert found[1] == [crash.Frame("/e/a.py", 1, "f", "x()")]
    plain = (
        'Traceback (most recent call last):\n  File "/e/b.py", line 2, in g\nEOFError\n'
        'Traceback (most recent call last):\n  File "/e/c.py", line 2, in g\nKeyError: 1\n'
    )
    assert cause(plain) == "KeyError: 1"
    assert (
        cause(
            plain.partition("Traceback")[2]
            .join(["Traceback", ""])
            .split('Traceback (most recent call last):\n  File "/e/c')[0]
        )
        == "EOFError"
    )


def test_chains_and_survived_tracebacks():
    """A chain ends in what killed it; a traceback that progress followed killed nobody."""
    chain = (
        'Traceback (most recent call last):\n  File "/e/a.py", line 1, in f\n    x()\nKeyError: 1\n\n'
        "During handling of the above exception, another exception occurred:\n\n"
        'Traceback (most recent call last):\n  File "/e/b.py", line 2, in g\n    y()\nRuntimeError: outer\n'
    )
    found = scanned(chain).cause()
    assert found[0] == "RuntimeError: outer"
    assert [frame.file for frame in found[1]] == ["/e/a.py", "/e/b.py"]
    survived = chain + STAMP + "Load weight begin. avail mem=137.34 GB\n"
    assert cause(survived) is None
    cut = 'Traceback (most recent call last):\n  File "/e/a.py", line 1, in f\n\n'
    assert cause(cut) is None
    interrupted = 'Traceback (most recent call last):\n  File "/e/a.py", line 1, in f\n' + STAMP + "other\n"
    assert cause(interrupted) is None


def test_memory_is_bounded():
    """Thousands of tracebacks and frames are not kept."""
    deep = (
        "Traceback (most recent call last):\n"
        + '  File "/e/a.py", line 1, in f\n    x()\n' * 500
        + "RecursionError: deep\n"
    )
    found = scanned(deep * 100).cause()
    assert len(found[1]) == 200


def test_a_large_log(tmp_path):
    """The first exception far from the end is found without reading all."""
    path = tmp_path / "a.log"
    filler = (STAMP + "Decode batch, #running-req: 1\n").encode() * 200_000
    trace = (
        STAMP
        + 'Scheduler hit an exception: Traceback (most recent call last):\n  File "/e/a.py", line 1, in f\n    x()\nValueError: deep inside\n'
    )
    path.write_bytes(b"start\n" + trace.encode() + filler + b"end\n")
    assert path.stat().st_size > 10_000_000
    assert crash.scan_log(path).cause()[0] == "ValueError: deep inside"
    path.write_bytes(filler)
    assert crash.scan_log(path).cause() is None
    path.write_bytes(b"")
    assert crash.scan_log(path).cause() is None
    assert crash.scan_log(tmp_path / "missing").cause() is None


# A server that was started on this machine, since its last boot.
HERE = {"machine": processes.machine_id(), "boot_id": processes.boot_id(), "run": {"pid": 1}}


@pytest.mark.parametrize(
    ("ended", "log", "expected"),
    [
        ({"reason": "/x: No such file"}, "", "cannot start the server: /x: No such file"),
        ({"signal": "SIGKILL"}, "", "ended by SIGKILL; the kernel's out-of-memory killer ends processes so (dmesg)"),
        ({"signal": "SIGSEGV"}, "", "ended by SIGSEGV"),
        ({"status": 3}, "last words\n", "ended with exit status 3: last words"),
        ({"status": 0}, "", "ended with exit status 0 without a word"),
        (None, "", "the process is gone and left no exit record"),
        (None, "x\n", "the process is gone and left no exit record: x"),
    ],
)
def test_causes_from_the_exit_alone(tmp_path, ended, log, expected):
    """Where the log says nothing, the exit does."""
    state = State(str(tmp_path))
    attempt = dict(HERE, release=None, log="l")
    found = crash.diagnose(state, attempt, scanned(log), ended)
    assert found["cause"] == expected
    assert found["frames"] == []


FIRST = edit(
    ["srt/worker.py"],
    "p = root / 'srt/worker.py'\np.write_text(p.read_text() + 'def added():\\n    raise ValueError(1)\\n')\n",
)
SECOND = edit(
    ["srt/worker.py"],
    "p = root / 'srt/worker.py'\nt = p.read_text()\np.write_text('# on top\\n' + t.replace('return batch', 'return  batch') + '# at the end\\n')\n",
)


def test_lines_are_attributed_through_the_stack(tmp_path):
    """A lower patch keeps its lines when a higher one moves them; deleted and untouched files have none."""
    box = Box(tmp_path)
    assert box.push("a/v1", FIRST)["status"] == "pushed"
    assert box.push("b/v1", SECOND)["status"] == "pushed"
    state = State(box.host["state_dir"])
    release = releases.current(state)
    lines = (box.package / "srt/worker.py").read_text().splitlines()
    owners = attribution.added_lines(state, release)["srt/worker.py"]
    assert {lines[number - 1]: owner for number, owner in owners.items() if number <= len(lines)} == {
        "# on top": "b/v1",
        "    return  batch + args.threshold()": "b/v1",
        "def added():": "a/v1",
        "    raise ValueError(1)": "a/v1",
        "# at the end": "b/v1",
    }
    assert attribution.added_lines(state, release, {"other.py"}) == {}


def test_the_patched_line_or_the_patched_file(tmp_path):
    """Exact where the frame lies in added lines; else the innermost in a changed file, and said so."""
    box = Box(tmp_path)
    box.push("a/v1", FIRST)
    state = State(box.host["state_dir"])
    worker = box.package / "srt/worker.py"
    lines = worker.read_text().splitlines()
    attempt = dict(HERE, release=1, base=1, log="l")

    def trace(number):
        return f'{STAMP}Scheduler hit an exception: Traceback (most recent call last):\n  File "{worker}", line {number}, in f\n    {lines[number - 1].strip()}\n  File "/lib/other.py", line 9, in g\nValueError: 1\n'

    exact = crash.diagnose(
        state, attempt, scanned(trace(lines.index("    raise ValueError(1)") + 1)), {"signal": "SIGKILL"}
    )
    assert exact["patched"]["patch"] == "a/v1"
    assert (exact["patched"]["exact"], exact["patched"]["text"]) == (True, "raise ValueError(1)")
    assert [frame["patch"] for frame in exact["frames"]] == ["a/v1", None]
    nearby = crash.diagnose(state, attempt, scanned(trace(1)), None)
    assert (nearby["patched"]["exact"], nearby["patched"]["file"]) == (False, "srt/worker.py")
    unknown = crash.diagnose(state, dict(attempt, release=77), scanned(trace(1)), None)
    assert unknown["patched"] is None
    assert len(unknown["frames"]) == 2


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        ({"status": None, "signal": "SIGKILL"}, "ended by SIGKILL; "),
        ({"status": 1, "signal": None}, "ConnectionResetError: [Errno 104] Connection reset by peer"),
    ],
)
def test_a_client_that_hung_up_is_not_what_a_signal_did(tmp_path, ended, expected):
    """The traceback of a broken connection was survived; where nothing but it is known, a signal's word goes before it."""
    text = 'Traceback (most recent call last):\n  File "/a.py", line 3, in handle\n    write()\n'
    scanner = scanned(text + "ConnectionResetError: [Errno 104] Connection reset by peer\n")
    attempt = {"attempt": 1, "release": None, "log": "/l", "run": None, "boot_id": processes.boot_id()}
    found = crash.diagnose(State(str(tmp_path)), attempt, scanner, ended)
    assert found["cause"].startswith(expected)
    assert bool(found["frames"]) == (ended["signal"] is None)
    hit = scanned("Scheduler hit an exception: " + text + "DistBackendError: NCCL error\n")
    assert crash.diagnose(State(str(tmp_path)), attempt, hit, ended)["cause"] == "DistBackendError: NCCL error"
