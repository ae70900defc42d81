"""Reading logs: the same lines as a reading of the whole would give, however they are cut; a follow loses nothing."""

import os
import re
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_host import until
from support import MemoryWire

from deployctl.agent import attempts, logs, processes
from deployctl.agent.main import Context, perform
from deployctl.agent.state import State

LINES = st.lists(
    st.one_of(
        st.sampled_from([b"", b"x", b"needle", b"a\rneedle", b"\xff\xfe needle", b"x" * 40]), st.binary(max_size=12)
    ),
    max_size=40,
).map(lambda lines: b"\n".join(line.replace(b"\n", b"") for line in lines))


class Reader:
    """An attempt whose log the test writes."""

    def __init__(self, root):
        self.root = root
        self.state = State(str(root / "state"))
        self.state.create()
        self.log = root / "p_a.log"
        self.spec()

    def spec(self, **changes):
        spec = {
            "attempt": 1,
            "log_tag": "a",
            "profile": "p",
            "release": None,
            "patches": [],
            "log": str(self.log),
            "marker": "none:1",
            "machine": processes.machine_id(),
            "boot_id": processes.boot_id(),
            "at": time.time(),
            "by": "ann",
        }
        self.state.write_json({**spec, **changes}, "attempts", 1, "spec.json")

    def ended(self):
        self.state.write_json({"status": 1, "signal": None}, "attempts", 1, "exit.json")

    def ask(self, wire=None, **args):
        wire = wire or MemoryWire()
        request = {"op": "logs", "args": args, "host": {"name": "h", "state_dir": self.state.root}}
        result = perform(Context(request, wire, [], {}))
        return result, wire.sent.getvalue()

    def follow(self, **args):
        return Following(self, args)


class Following:
    """A follow in a thread of its own."""

    def __init__(self, reader, args):
        self.wire = MemoryWire()
        self.result = None

        def run():
            self.result, _ = reader.ask(self.wire, follow=True, **args)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        until(lambda: [e for e in self.wire.events if e["event"] == "position"], "the follow")

    def until(self, text):
        until(lambda: text in self.wire.sent.getvalue(), text)
        return self.wire.sent.getvalue()

    def finish(self):
        self.thread.join(20)
        assert not self.thread.is_alive()
        return self.wire.sent.getvalue()

    def stop(self):
        self.wire.cancelled.set()
        return self.finish()


@pytest.fixture
def reader(tmp_path):
    return Reader(tmp_path)


@settings(max_examples=60, deadline=None)
@given(content=LINES, lines=st.integers(0, 6), chunk=st.integers(1, 30))
def test_the_last_matches_are_those_of_the_whole(tmp_path_factory, content, lines, chunk):
    """Read from the end in chunks of any size: the same as matching every line and keeping the last."""
    reader = Reader(tmp_path_factory.mktemp("log"))
    reader.log.write_bytes(content)
    whole = (
        [line + b"\n" for line in (content[:-1] if content.endswith(b"\n") else content).split(b"\n")]
        if content
        else []
    )
    before = logs._CHUNK
    logs._CHUNK = chunk
    try:
        _, sent = reader.ask(grep="needle|^$", lines=lines)
        _, everything = reader.ask(grep="needle|^$")
        _, tail = reader.ask(lines=lines)
    finally:
        logs._CHUNK = before
    matching = [line for line in whole if any(re.search(b"needle|^$", part) for part in line[:-1].split(b"\r"))]
    # An unfinished last line is complete for a filter; the end of the file is no line of its own.
    assert b"".join(matching[max(0, len(matching) - lines) :]) == sent
    assert b"".join(matching) == everything
    assert b"".join(whole[max(0, len(whole) - lines) :]).rstrip(b"\n") == tail.rstrip(b"\n")


@settings(max_examples=80, deadline=None)
@given(
    entries=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.booleans()), min_size=1, max_size=20),
    asked=st.integers(-1, 60),
)
def test_since_is_the_first_line_of_that_time(tmp_path_factory, entries, asked):
    """Stamped lines with others between them, after line ends or progress bars: bisection finds what a scan finds."""
    reader = Reader(tmp_path_factory.mktemp("log"))
    clock, content, starts = 0, b"", []
    for step, unstamped, bar in entries:
        clock += step
        content += b"bar 1\rbar 2\r" if bar else b""
        starts.append((clock, len(content)))
        content += b"[2026-01-31 14:%02d:%02d TP0] x\n" % divmod(clock, 60) + b"  more\n" * unstamped
    reader.log.write_bytes(content)
    wanted = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.mktime((2026, 1, 31, 14, 0, asked, 0, 0, -1))))
    _, sent = reader.ask(since=wanted)
    expected = next((content[at:] for second, at in starts if second >= asked), b"")
    assert expected == sent


def test_a_log_without_time_stamps(reader):
    """All of it is newer than its launch, none of it than its last change; between the two nothing is known: exit 2."""
    reader.spec(at=time.time() - 7200)
    reader.log.write_bytes(b"INFO no stamps\n")
    os.utime(reader.log, (time.time() - 3600, time.time() - 3600))
    assert b"INFO no stamps\n" == reader.ask(since="3h")[1]
    assert b"" == reader.ask(since="10m")[1]
    result, _ = reader.ask(since="90m")
    assert (2, "no-time-stamps") == (result["exit"], result["error"]["kind"])


def test_a_log_that_cannot_be_opened(reader):
    """Named, with the reason; a folder in its place too."""
    reader.log.mkdir()
    result, _ = reader.ask()
    assert "log-missing" == result["error"]["kind"]
    assert f"{reader.log}: Is a directory" in result["error"]["message"]


def test_the_crash_of_a_log_that_is_gone(reader):
    """The exit is still known, and that the log is gone is said."""
    reader.ended()
    crash = reader.ask(crash=True)[0]["crash"]
    assert f"ended with exit status 1 without a word (its log is gone: {reader.log})" == crash["cause"]


def test_ctrl_c_ends_a_long_answer(reader):
    """Between two chunks, filtered or not."""
    reader.log.write_bytes(b"x needle\n" * 200_000)
    for args in ({"whole": True}, {"grep": "needle"}, {"grep": "needle", "lines": 150_000}):
        wire = MemoryWire()
        wire.cancelled.set()
        assert b"" == reader.ask(wire, **args)[1]


def test_a_rotation_loses_nothing(reader):
    """The server may write to the old file until the very moment of the change, and no filter drops what it held."""
    reader.log.write_bytes(b"")
    following = reader.follow(grep="keep")
    expected = b""
    for number in range(20):
        with open(reader.log, "ab") as out:
            out.write(b"drop\nkeep %d\nkeep unfinished %d" % (number, number))
            expected += b"keep %d\nkeep unfinished %d\n" % (number, number)
            new = reader.root / "new"
            new.write_bytes(b"")
            os.replace(new, reader.log)
        until(lambda n=number: len([e for e in following.wire.events if e["event"] == "truncated"]) == n + 1)
    following.until(b"keep unfinished 19")
    assert expected == following.stop()


def test_a_log_that_is_moved_away_is_read_to_its_end(reader):
    """The server writes on to its open file; a follow ends when the server does, not never."""
    reader.log.write_bytes(b"one\n")
    following = reader.follow()
    with open(reader.log, "ab") as out:
        os.rename(reader.log, reader.root / "moved")
        out.write(b"two\n")
        out.flush()
        following.until(b"two\n")
    reader.ended()
    assert b"one\ntwo\n" == following.finish()
    assert "server-ended" == following.wire.events[-1]["event"]


def test_last_words_without_an_end(reader):
    """A dying process's last line often has no newline: a filter shows it too, once the server is gone."""
    reader.log.write_bytes(b"x\nfatal: no card")
    following = reader.follow(grep="fatal", lines=0)
    with open(reader.log, "ab") as out:
        out.write(b"\ndrop\nfatal: bye")
    reader.ended()
    assert b"fatal: bye\n" == following.finish()[-11:]


def test_a_dead_servers_children_may_still_write(reader):
    """Each last word is waited for anew."""
    reader.log.write_bytes(b"")
    reader.ended()
    following = reader.follow()
    until(lambda: following.thread.is_alive())
    with open(reader.log, "ab") as out:
        out.write(b"bye\n")
    assert b"bye\n" == following.finish()


@pytest.mark.parametrize("case", ["starting", "elsewhere"])
def test_without_evidence_a_server_is_not_dead(reader, case, monkeypatch):
    """A launch whose keeper has not written yet, and one on another machine that shares this folder, are followed."""
    monkeypatch.setattr(logs, "_LOOK_S", 0.01)
    monkeypatch.setattr(logs, "_LAST_WORDS_S", 0.05)
    looked = []
    real = attempts.state_of
    monkeypatch.setattr(attempts, "state_of", lambda attempt: looked.append(real(attempt)) or looked[-1])
    if case == "elsewhere":
        reader.spec(machine="another", boot_id="another")
    reader.log.write_bytes(b"")
    following = reader.follow()
    until(lambda: len(looked) > 12)
    assert following.thread.is_alive()
    assert {"loading" if case == "starting" else "unknown"} == set(looked)
    assert b"" == following.stop()


def test_a_real_servers_log_is_followed_to_its_end(host):
    """What is printed comes at once; the follow ends with the server."""
    script = (
        "import time\nprint('up', flush=True)\ninput_ = open(__file__ + '.go')\ninput_.read()\nprint('bye', flush=True)"
    )
    os.mkfifo(host.root / "engine.py.go")
    host.launch("a", argv=host.script(script), wait=False)
    wire = MemoryWire()
    context = Context({"op": "logs", "args": {"follow": True}, "host": host.host}, wire, [], {})
    thread = threading.Thread(target=perform, args=(context,), daemon=True)
    thread.start()
    until(lambda: b"up\n" in wire.sent.getvalue())
    (host.root / "engine.py.go").write_text("go")
    thread.join(20)
    assert b"up\nbye\n" == wire.sent.getvalue()
    assert "server-ended" == wire.events[-1]["event"]


def test_a_pattern_that_cannot_be_compiled(reader):
    """Whatever the reason: exit 2."""
    reader.log.write_bytes(b"x\n")
    for pattern in ("(", "x{99999999999999999999}"):
        assert 2 == reader.ask(grep=pattern)[0]["exit"]
