"""Diagnosis of logs as engines really write them: several ranks at once, groups, native crashes, what follows a cause."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launch_host import until
from support import Box, edit

from deployctl.agent import attribution, crash, objects, releases
from deployctl.agent.state import State

STAMP = "[2026-01-31 14:00:00 TP0] "
OTHER = "[2026-01-31 14:00:00 TP1] "
TRACE = (
    STAMP + "Scheduler hit an exception: Traceback (most recent call last):\n"
    '  File "/e/scheduler.py", line 10, in run\n    self.step()\n    ^^^^^^^^^^^\n'
    '  File "/e/worker.py", line 20, in step\n    x = y + z\n        ~~^~~\n'
    "RuntimeError: The size of tensor a (160) must match the size of tensor b (2)\n"
)


def scanned(text):
    scanner = crash.CrashScanner()
    for line in crash.split(text.encode()):
        scanner.feed(line)
    return scanner


def cause(text):
    found = scanned(text).cause()
    return found and found[0]


@pytest.mark.parametrize("after", range(1, 7))
def test_another_ranks_line_may_stand_anywhere_in_a_traceback(after):
    """Ranks write to one log: the traceback goes on after it."""
    lines = TRACE.splitlines(keepends=True)
    text = "".join([*lines[:after], OTHER + "something else\n", *lines[after:]])
    found = scanned(text).cause()
    assert "RuntimeError: The size of tensor a (160) must match the size of tensor b (2)" == found[0]
    assert ["run", "step"] == [frame.function for frame in found[1]]


def test_lines_of_no_rank_between_an_interrupted_traceback_and_its_exception():
    """Once interrupted, only what looks like an exception is taken for one; and not after pages of other output."""
    lines = TRACE.splitlines(keepends=True)
    text = "".join(lines[:-1]) + OTHER + "x\nINFO:     127.0.0.1 GET\n" + lines[-1]
    assert cause(text).startswith("RuntimeError")
    late = "".join(lines[:-1]) + (OTHER + "x\n") * 200 + lines[-1]
    assert cause(late) is None


def test_an_exception_group_names_its_sub_exception():
    """Python 3.11 and later, servers on anyio: "1 sub-exception" is no cause."""
    import traceback

    def boom():
        raise KeyError("draft_model")

    problems = []
    for act in (boom, lambda: 1 / 0):
        try:
            act()
        except (KeyError, ZeroDivisionError) as error:
            problems.append(error)

    def fail():
        raise ExceptionGroup("unhandled errors in a TaskGroup", problems)

    with pytest.raises(ExceptionGroup) as group:
        fail()
    text = "".join(traceback.format_exception(group.value))
    found = scanned("INFO: x\n" + text + STAMP + "next\n").cause()
    assert "KeyError: 'draft_model'" == found[0]
    assert "boom" == found[1][-1].function
    assert cause(text + "\n" + TRACE).startswith("RuntimeError")


def test_a_native_crash_has_its_python_stack(tmp_path):
    """The fault handler prints the innermost frame first, and other threads too: the current one's counts."""
    import subprocess
    import sys

    script = tmp_path / "native.py"
    script.write_text(
        "import faulthandler, threading, time, os, signal, resource\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "faulthandler.enable()\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "def kernel():\n    os.kill(os.getpid(), signal.SIGSEGV)\n    time.sleep(5)\n"
        "def step():\n    kernel()\nstep()\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    found = scanned(done.stderr).cause()
    assert "Fatal Python error: Segmentation fault" == found[0]
    assert ["<module>", "step", "kernel"] == [frame.function for frame in found[1]]
    assert {str(script)} == {frame.file for frame in found[1]}
    # A second dump, as every rank writes one, changes nothing; nor does what follows.
    again = scanned(done.stderr + "Extension modules: a, b\n" + done.stderr).cause()
    assert found == again


def test_a_stack_of_any_depth_is_kept_in_bounds():
    """As tracebacks are."""
    text = "Fatal Python error: Aborted\n\nCurrent thread 0x00007f0000000000 [python] (most recent call first):\n"
    text += '  File "/e/a.py", line 1 in f\n' * 1000
    assert 200 == len(scanned(text).cause()[1])


def test_an_abort_in_native_code_is_named_by_its_words():
    """Not by "terminate called"."""
    text = (
        "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: an illegal memory access\n"
    )
    assert "what():  CUDA error: an illegal memory access" == cause(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            STAMP + "Rank 0 scheduler is dead. Please check if there are relevant logs.\n" + STAMP + "Exit code: -9\n",
            "Rank 0 scheduler is dead; Exit code: -9 (SIGKILL; the kernel's out-of-memory killer ends processes so: dmesg)",
        ),
        ("Rank 1 scheduler is dead.\nExit code: -11\n", "Rank 1 scheduler is dead; Exit code: -11 (SIGSEGV)"),
        ("Rank 1 scheduler is dead.\nExit code: -999\n", "Rank 1 scheduler is dead; Exit code: -999"),
        ("Rank 1 scheduler is dead.\n", "Rank 1 scheduler is dead."),
        (
            "Subprocess scheduler_0 (pid=7) crashed with exit code -6.  Triggering SIGQUIT\n",
            "Subprocess scheduler_0 (pid=7) crashed with exit code -6.  Triggering SIGQUIT (SIGABRT)",
        ),
    ],
)
def test_exit_codes_are_put_in_words(text, expected):
    """A negative one is a signal, and SIGKILL has one usual sender."""
    assert expected == cause(text)


def test_argparse_is_told_from_compilers():
    """Both print "error:"; a failed kernel build is explained by the traceback that follows, with its frames."""
    assert "serve: error: unrecognized arguments: --x" == cause(
        "serve: error: unrecognized arguments: --x\n" + TRACE[61:]
    )
    assert "serve: error: give a model" == cause("usage: serve [-h]\nserve: error: give a model\n")
    for line in (
        "kernel.cu(12): error: identifier undefined\n",
        "a.cc:3:1: error: argument of type\n",
        "ninja: error: x\n",
    ):
        assert cause(line + TRACE).startswith("RuntimeError")
        assert cause(line) is None


def test_what_answers_lives():
    """A traceback of a request that failed long ago did not kill a server that answered after it."""
    text = "ERROR:    Exception in ASGI application\n" + TRACE.replace(STAMP + "Scheduler hit an exception: ", "")
    assert cause(text).startswith("RuntimeError")
    assert cause(text + '[2026-01-31 14:00:00] INFO:     127.0.0.1:5 - "POST /generate HTTP/1.1" 200 OK\n') is None


@given(st.binary(max_size=400))
def test_any_bytes_are_read(content):
    """A log holds whatever a kernel printed."""
    scanner = crash.CrashScanner()
    for line in crash.split(content + TRACE.encode()):
        scanner.feed(line)
    scanner.cause()


def test_much_output_after_the_cause(tmp_path):
    """All threads' stacks, megabytes of them, are printed after it; the cause is found in any size of log."""
    path = tmp_path / "a.log"
    plain = TRACE.replace(STAMP + "Scheduler hit an exception: ", "")
    noise = b"Thread 0x1 (idle)  wait (threading.py:320)\n" * 120_000
    path.write_bytes(noise * 2 + plain.encode() + noise * 2)
    assert path.stat().st_size > 4 * crash._WINDOW
    scanner = crash.scan_log(path)
    assert scanner.cause()[0].startswith("RuntimeError")
    assert ["run", "step"] == [frame.function for frame in scanner.cause()[1]]
    assert scanner.tail[-1].startswith(b"Thread 0x1")
    path.write_bytes(noise * 2 + b"Traceback (most recent call last):\n" + noise * 2)
    assert crash.scan_log(path).cause() is None
    # A progress bar of megabytes has no line end at all.
    path.write_bytes(TRACE.encode() + b"\rloading 1%" * 1_200_000)
    assert crash.scan_log(path).cause()[0].startswith("RuntimeError")


def test_only_the_chosen_exceptions_frame_is_patched_but_all_are_shown(tmp_path):
    """Of a chain the root decides; the text of the line is the release's own, whatever the file says by now."""
    box = Box(tmp_path)
    body = "p = root / 'srt/worker.py'\np.write_text(p.read_text() + 'def added():\\n    raise ValueError(1)\\n')\n"
    box.push("a/v1", edit(["srt/worker.py"], body))
    state = State(box.host["state_dir"])
    worker = box.package / "srt" / "worker.py"
    number = worker.read_text().splitlines().index("    raise ValueError(1)") + 1
    text = (
        STAMP + "Scheduler hit an exception: Traceback (most recent call last):\n"
        f'  File "{worker}", line {number}, in added\n    something else by now\nValueError: 1\n\n'
        "The above exception was the direct cause of the following exception:\n\n"
        f'Traceback (most recent call last):\n  File "{worker}", line {number - 1}, in outer\n    f()\nRuntimeError: 2\n'
    )
    found = crash.diagnose(state, {"release": 1, "base": 1, "log": "l"}, scanned(text), {"status": 1})
    assert "RuntimeError: 2" == found["cause"]
    assert [("added", "a/v1"), ("outer", "a/v1")] == [(frame["function"], frame["patch"]) for frame in found["frames"]]
    assert (number, "raise ValueError(1)", True) == tuple(found["patched"][key] for key in ("line", "text", "exact"))


@given(st.data())
def test_unchanged_lines_keep_their_owner(data):
    """Whatever a higher patch inserts, removes or moves: a line that is in no added hunk is not called added."""
    lines = data.draw(st.lists(st.sampled_from("abcdefg"), max_size=12))
    mine = data.draw(st.lists(st.sampled_from("xyz"), min_size=1, max_size=3))
    at = data.draw(st.integers(0, len(lines)))
    middle = lines[:at] + mine + lines[at:]
    first = attribution._carry(lines, middle, {}, "a/v1")
    assert mine == [middle[number - 1] for number in sorted(first)]
    top = data.draw(st.lists(st.just("T"), max_size=3))
    final = top + middle
    second = attribution._carry(middle, final, first, "b/v1")
    assert {number + len(top): "a/v1" for number in first} == {n: o for n, o in second.items() if o == "a/v1"}
    assert list(range(1, len(top) + 1)) == sorted(n for n, o in second.items() if o == "b/v1")


def test_a_large_file_with_many_edits(tmp_path):
    """Thousands of lines, half of them blank or brackets: every edited line is found, and no other."""
    random.seed(1)
    before = [random.choice([b"", b")", b"    )", b"x%d = 1" % number]) for number in range(8000)]
    places = [number for number, line in enumerate(before) if line.startswith(b"x")][::97]
    after = list(before)
    for place in places:
        after[place] += b"  # patched"
    assert {place + 1 for place in places} == set(attribution._carry(before, after, {}, "a/v1"))


def test_lines_that_a_release_does_not_have(tmp_path):
    """A frame may be newer than the release that is asked."""
    state = State(str(tmp_path))
    sha = objects.put(state, b"one\n  two\n")
    release = {"files": {"a.py": {"sha": sha, "mode": 0o644}, "gone.py": {"sha": None, "mode": None}}, "patches": []}
    assert "two" == attribution.line_of(state, release, "a.py", 2)
    assert ["", "", ""] == [
        attribution.line_of(state, release, *place) for place in (("a.py", 9), ("b.py", 1), ("gone.py", 1))
    ]
    assert {} == attribution.added_lines(state, release)


def test_an_unreadable_release_still_gives_frames(host):
    """Attribution is a service on top: its trouble hides nothing."""
    text = TRACE.replace("\n", "\\n").replace("'", "")
    host.launch("a", argv=host.script(f"print('''{text}''', flush=True)\nraise SystemExit(1)"), wait=False)
    until(lambda: host.attempt()["exit"])
    found = crash.diagnose(host.state, dict(host.attempt(), release=99), crash.scan_log(host.log()), None)
    assert (2, None) == (len(found["frames"]), found["patched"])
    assert releases.numbers(host.state) == []
