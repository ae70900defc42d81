"""Logs: the end, matches, a time range, the crash, all of it; large files cost nothing; a follow survives rotation."""

import os
import threading
import time

import pytest
from support import MemoryWire

from deployctl.agent import attempts, logs, processes
from deployctl.agent.failure import Failure
from deployctl.agent.main import Context, perform
from deployctl.agent.state import State

STAMPED = "".join(
    f"[2026-01-31 14:{minute:02d}:00] line {minute}\n" + ("  continued\n" if minute == 30 else "")
    for minute in range(60)
)


class LogHost:
    """A state directory with attempts and their logs; no server."""

    def __init__(self, root):
        self.root = root
        self.state = State(str(root / "state"))
        self.state.create()

    def attempt(self, number, tag, content, **verdict):
        path = self.root / f"p_{tag}.{number}.log"
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        spec = {
            "attempt": number,
            "log_tag": tag,
            "profile": "p",
            "release": None,
            "patches": [],
            "log": str(path),
            "marker": f"none:{number}",
            "machine": processes.machine_id(),
            "boot_id": processes.boot_id(),
            "at": time.time(),
            "by": "ann",
            "argv": [],
            "port": 1,
            "ready": {"url": "http://127.0.0.1:1/health", "timeout_s": 1},
            "engine": "sglang",
            "command": "launch",
        }
        self.state.write_json(spec, "attempts", number, "spec.json")
        if verdict:
            self.state.write_json(dict(verdict, at=time.time()), "attempts", number, "verdict.json")
        return path

    def ask(self, wire=None, **args):
        wire = wire or MemoryWire()
        request = {"op": "logs", "args": args, "host": {"name": "h", "state_dir": self.state.root}}
        result = perform(Context(request, wire, [], {}))
        return result, wire.sent.getvalue()


@pytest.fixture
def host(tmp_path):
    return LogHost(tmp_path)


def test_the_newest_attempt_and_its_last_lines(host):
    """A hundred lines by default; -n others; the newest attempt unless another is named."""
    host.attempt(1, "a", "old\n")
    host.attempt(2, "b", "".join(f"{n}\n" for n in range(300)))
    result, sent = host.ask()
    assert (result["attempt"], result["log_tag"]) == (2, "b")
    assert sent.decode().split() == [str(n) for n in range(200, 300)]
    assert host.ask(lines=3)[1] == b"297\n298\n299\n"
    assert host.ask(lines=0)[1] == b""
    assert host.ask(lines=1000)[1].count(b"\n") == 300
    assert host.ask(log_tag="a")[1] == b"old\n"
    assert host.ask(attempt=1)[1] == b"old\n"


def test_a_line_without_its_end_counts(host):
    """The last line may still be being written."""
    host.attempt(1, "a", "one\ntwo")
    assert host.ask(lines=1)[1] == b"two"
    assert host.ask(lines=2)[1] == b"one\ntwo"


def test_older_attempts_of_the_same_tag_are_named(host):
    """A repeated tag means the newest; the older can be asked for."""
    host.attempt(1, "a", "first\n")
    host.attempt(2, "a", "second\n")
    result, sent = host.ask(log_tag="a")
    assert sent == b"second\n"
    assert result["same_tag"] == [1]


def test_matches(host):
    """All of them, or the last n; any bytes; progress bars count by each of their states."""
    host.attempt(1, "a", b"alpha 1\n\xff beta\nalpha 2\rgamma\nalpha 3")
    assert host.ask(grep="alpha")[1] == b"alpha 1\nalpha 2\rgamma\nalpha 3\n"
    assert host.ask(grep="alpha", lines=1)[1] == b"alpha 3\n"
    assert host.ask(grep="alpha", lines=0)[1] == b""
    assert host.ask(grep="nothing")[1] == b""
    result, _ = host.ask(grep="(")
    assert (result["exit"], result["error"]["kind"]) == (2, "usage")


@pytest.mark.parametrize(
    ("since", "first"),
    [
        ("2026-01-31 14:58", b"[2026-01-31 14:58:00] line 58"),
        ("2026-01-31T14:30:00", b"[2026-01-31 14:30:00] line 30"),
        ("2026-01-31 14:30:01", b"[2026-01-31 14:31:00] line 31"),
        ("2020-01-01", b"[2026-01-31 14:00:00] line 0"),
    ],
)
def test_since_a_time(host, since, first):
    """By bisection over the engine's stamps; lines without one belong to the line before."""
    host.attempt(1, "a", STAMPED)
    sent = host.ask(since=since)[1]
    assert sent.startswith(first)
    assert sent.endswith(b"line 59\n")


def test_since_finds_nothing_newer(host):
    """A time after the end gives nothing; with a filter likewise; an empty log is empty."""
    host.attempt(1, "a", STAMPED)
    assert host.ask(since="2030-01-01")[1] == b""
    assert host.ask(since="2026-01-31 14:50", grep="line 5[58]")[1].count(b"\n") == 2
    host.attempt(2, "b", "")
    assert host.ask(since="10m")[1] == b""
    host.attempt(3, "c", "no stamps\nat all\n")
    assert host.ask(since="10m")[1] == b"no stamps\nat all\n"


def test_times_as_people_write_them(host):
    """Durations and clock times; anything else is exit 2."""
    now = time.strftime("[%Y-%m-%d %H:%M:%S] now\n")
    host.attempt(1, "a", STAMPED + "[2026-99-99 99:99:99] no date\n" + now)
    for since in ("10m", "1.5h", time.strftime("%H:%M", time.localtime(time.time() - 60)), "00:00:00"):
        assert host.ask(since=since)[1] == now.encode(), since
    result, _ = host.ask(since="yesterday")
    assert (result["exit"], result["error"]["kind"]) == (2, "usage")


def test_a_large_log_is_read_from_its_end(host):
    """Fifty megabytes: a few lines from the end, a filter and a time range stay quick and small."""
    path = host.attempt(1, "a", None)
    line = b"[2026-01-31 14:00:00 TP0] Decode batch, #running-req: 10, accept len: 2.20, cuda graph: True\n"
    with open(path, "wb") as out:
        out.writelines(line * (1_000_000 // len(line)) for _ in range(50))
        out.write(b"[2026-01-31 15:00:00] needle\n")
    assert host.ask(lines=1)[1] == b"[2026-01-31 15:00:00] needle\n"
    assert host.ask(grep="needle")[1] == b"[2026-01-31 15:00:00] needle\n"
    assert host.ask(since="2026-01-31 14:30")[1] == b"[2026-01-31 15:00:00] needle\n"
    result, sent = host.ask(whole=True)
    assert len(sent) == result["log_bytes"] == os.path.getsize(path)


def test_the_list(host):
    """Every attempt with its log and size; a log that is gone is not hidden."""
    host.attempt(1, "a", "12345")
    host.attempt(2, "b", None)
    result, _ = host.ask(list=True)
    assert [(entry["log_tag"], entry["log_bytes"]) for entry in result["attempts"]] == [("a", 5), ("b", None)]


def test_what_is_not_there(host):
    """No attempts, an unknown one, a log that is gone: named, with what exists."""
    assert host.ask()[0]["error"]["kind"] == "unknown-attempt"
    host.attempt(1, "a", None)
    result, _ = host.ask()
    assert result["error"]["kind"] == "log-missing"
    assert "p_a.1.log" in result["error"]["message"]
    result, _ = host.ask(attempt=9)
    assert result["exit"] == 2
    assert "1 (a)" in result["error"]["hint"]


def test_the_crash_alone(host):
    """From the verdict where there is one; else from the log; none is said so."""
    host.attempt(1, "a", "x\n", state="crashed", crash={"cause": "known"})
    assert host.ask(crash=True)[0]["crash"] == {"cause": "known"}
    trace = (
        "[2026-01-31 14:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "/x/y.py", line 3, in run\n    boom()\nValueError: no\n'
    )
    host.attempt(2, "b", trace)
    crash = host.ask(crash=True)[0]["crash"]
    assert crash["cause"] == "ValueError: no"
    assert crash["frames"] == [{"file": "/x/y.py", "line": 3, "function": "run", "text": "boom()", "patch": None}]
    host.attempt(3, "c", "all is well\n")
    assert host.ask(crash=True)[0]["crash"] is None


class Following:
    """A follow in a thread; what it sent so far."""

    def __init__(self, host, **args):
        self.wire = MemoryWire()
        self.thread = threading.Thread(target=lambda: host.ask(self.wire, follow=True, **args), daemon=True)
        self.thread.start()

    def until(self, text):
        finish = time.monotonic() + 20
        while text not in self.wire.sent.getvalue():
            assert time.monotonic() < finish, self.wire.sent.getvalue()
            time.sleep(0.01)
        return self.wire.sent.getvalue()

    def stop(self):
        self.wire.cancelled.set()
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def running(monkeypatch):
    """The attempt's server counts as alive."""
    alive = {"alive": True}
    monkeypatch.setattr(attempts, "is_alive", lambda _attempt: alive["alive"])
    return alive


def test_following_through_truncation_and_rotation(host, running):
    """New bytes as they come; a log begun anew is followed from its start."""
    path = host.attempt(1, "a", "one\n")
    following = Following(host, lines=1)
    following.until(b"one\n")
    with open(path, "a") as out:
        out.write("two\n")
    following.until(b"two\n")
    path.write_text("3\n")
    following.until(b"3\n")
    os.rename(path, str(path) + ".1")
    path.write_text("four\n")
    assert following.until(b"four\n") == b"one\ntwo\n3\nfour\n"
    assert [event["event"] for event in following.wire.events].count("truncated") == 2
    following.stop()


def test_following_matches_only(host, running):
    """The filter applies to whole lines, also those that come in pieces."""
    path = host.attempt(1, "a", "keep 0\n")
    following = Following(host, grep="keep")
    following.until(b"keep 0\n")
    with open(path, "a", buffering=1) as out:
        out.write("drop 1\nkee")
        out.flush()
        out.write("p 2\n")
    assert following.until(b"keep 2\n") == b"keep 0\nkeep 2\n"
    following.stop()


def test_following_goes_on_where_a_lost_link_ended(host, running):
    """from_offset: nothing twice, nothing lost."""
    host.attempt(1, "a", "one\ntwo\n")
    following = Following(host, from_offset=4)
    assert following.until(b"two\n") == b"two\n"
    following.stop()


def test_following_ends_with_the_server(host, running):
    """A dead server writes no more: said so, after its last lines."""
    host.attempt(1, "a", "last\n")
    running["alive"] = False
    host.state.write_json({"status": 1, "signal": None}, "attempts", 1, "exit.json")
    following = Following(host)
    following.thread.join(20)
    assert not following.thread.is_alive()
    assert following.wire.sent.getvalue() == b"last\n"
    assert following.wire.events[-1]["event"] == "server-ended"


def test_a_reader_that_goes_away(host):
    """Sending stops when nobody listens."""
    host.attempt(1, "a", "x" * 100)
    wire = MemoryWire()
    wire.gone.set()
    assert host.ask(wire, whole=True)[1] == b""


def test_no_stamp_at_all():
    """A time in a log without stamps is its end."""
    with pytest.raises(Failure, match="is no time"):
        logs._moment("soon")
