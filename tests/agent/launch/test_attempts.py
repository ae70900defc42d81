"""What the records of an attempt say, and who may change them."""

import os
import time
from types import SimpleNamespace

import pytest

from deployctl.agent import attempts, processes
from deployctl.agent.failure import Failure
from deployctl.agent.state import State


@pytest.fixture
def state(tmp_path):
    return State(str(tmp_path / "state"))


def write(state, number, **changes):
    """An attempt as launch leaves it, with its keeper just starting."""
    spec = {
        "attempt": number,
        "log_tag": f"t{number}",
        "profile": "eagle3",
        "release": 1,
        "patches": ["a/v1"],
        "marker": f"nobody:{number}",
        "boot_id": processes.boot_id(),
        "machine": processes.machine_id(),
        "node": os.uname().nodename,
        "at": time.time(),
        "monotonic": time.monotonic(),
        "by": "ann",
        "log": "/nowhere/x.log",
        "run_id": f"run-{number}",
        "rank": 0,
    }
    parts = {part: changes.pop(part) for part in ("run", "exit", "verdict") if part in changes}
    spec.update(changes)
    state.write_json(spec, "attempts", number, "spec.json")
    for part, value in parts.items():
        state.write_json(value, "attempts", number, part + ".json")
    return attempts.load(state, number)


def living():
    return {"pid": os.getpid(), "start": processes.start_time(os.getpid()), "boot_id": processes.boot_id()}


GONE = {"pid": 2**22 + 1, "start": 5, "boot_id": processes.boot_id()}
ENDED = {"status": 0, "signal": None, "at": 1.0}


@pytest.mark.parametrize(
    ("records", "state_of"),
    [
        ({}, "loading"),
        ({"run": living()}, "loading"),
        ({"run": living(), "verdict": {"state": "ready"}}, "ready"),
        ({"run": living(), "verdict": {"state": "timeout"}}, "timeout"),
        ({"run": living(), "verdict": {"state": "smoke_failed"}}, "smoke_failed"),
        ({"run": living(), "verdict": {"state": "crashed"}}, "crashed"),
        ({"run": GONE}, "crashed"),
        ({"run": GONE, "verdict": {"state": "ready"}}, "crashed"),
        ({"run": living(), "exit": ENDED, "verdict": {"state": "ready"}}, "crashed"),
        ({"run": GONE, "verdict": {"state": "ready", "stopping": {"by": "ann", "at": 1.0}}}, "stopped"),
        ({"run": living(), "verdict": {"state": "ready", "stopping": {"by": "ann", "at": 1.0}}}, "ready"),
        ({"run": GONE, "verdict": {"state": "stopped"}}, "stopped"),
        ({"run": dict(living(), boot_id="x"), "boot_id": "x"}, "crashed"),
        ({"run": GONE, "machine": "elsewhere"}, "unknown"),
        ({"run": GONE, "node": "elsewhere"}, "unknown"),
        ({"run": GONE, "node": "elsewhere", "verdict": {"state": "stopped"}}, "stopped"),
        ({"monotonic": time.monotonic() - 61}, "crashed"),
        ({"monotonic": None, "at": time.time() - 61}, "crashed"),
        ({"exit": {"status": 127, "signal": None, "at": 1.0, "reason": "x"}}, "crashed"),
    ],
)
def test_the_state_follows_from_the_evidence(state, records, state_of):
    """A verdict, an exit record, a living process, the boot, the machine: never dead without evidence."""
    assert state_of == attempts.state_of(write(state, 1, **records))


def test_a_final_verdict_is_not_overwritten_by_a_slower_watcher(state):
    """What a stop wrote stays, whatever somebody who watches from before believes; other fields are added."""
    attempt = write(state, 1)
    slower = attempts.load(state, 1)
    attempts.set_verdict(state, attempt, state="stopped", by="ann")
    attempts.set_verdict(state, slower, state="ready", ready_seconds=3.0)
    assert slower["verdict"]["state"] == "stopped"
    assert slower["verdict"]["ready_seconds"] == 3.0
    attempts.set_verdict(state, slower, state="crashed")
    assert attempts.load(state, 1)["verdict"]["state"] == "stopped"


def test_a_verdict_is_written_where_locks_are_not_to_be_had(state, monkeypatch):
    """A file system without flock loses only the guard."""

    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(attempts.fcntl, "flock", refuse)
    attempts.set_verdict(state, write(state, 1), state="ready")
    assert attempts.load(state, 1)["verdict"]["state"] == "ready"


def test_the_expectation_is_the_median_of_the_last_five(state):
    """Of that profile, of loads whose time was seen, per phase."""
    seconds = [500.0, 1.0, 10.0, 30.0, 20.0, 40.0]
    for number, value in enumerate(seconds, 1):
        phases = [{"name": "weights", "seconds": value / 2}]
        write(state, number, verdict={"state": "ready", "ready_seconds": value, "phases": phases})
    write(state, 7, verdict={"state": "ready", "ready_seconds": 9999.0, "phases": [], "late": True})
    write(state, 8, profile="other", verdict={"state": "ready", "ready_seconds": 7.0})
    write(state, 9, verdict={"state": "crashed"})
    assert attempts.expectation(state, "eagle3") == {"ready_seconds": 20.0, "phases": {"weights": 10.0}}
    assert attempts.expectation(state, "other") == {"ready_seconds": 7.0, "phases": {}}
    assert attempts.expectation(state, "never") is None


def test_an_attempt_is_found_by_number_tag_command_or_as_the_newest(state):
    """And what is not there is said with what is."""
    with pytest.raises(Failure, match="there is no attempt yet on this host") as caught:
        attempts.choose(state)
    assert "launch" in caught.value.hint
    assert attempts.newest(state) is None
    for number in (1, 2, 10):
        write(state, number, log_tag="same" if number < 10 else "last")
    assert attempts.choose(state)["attempt"] == attempts.newest(state)["attempt"] == 10
    assert attempts.choose(state, number=1)["attempt"] == 1
    assert attempts.choose(state, tag="same")["attempt"] == 2
    assert attempts.choose(state, run_id="run-2")["attempt"] == 2
    for words, text in (({"number": 5}, "attempt 5"), ({"tag": "x"}, "log tag x"), ({"run_id": "x"}, "this command")):
        with pytest.raises(Failure, match=text) as caught:
            attempts.choose(state, **words)
        assert caught.value.exit_code == 2
        assert "1 (same), 2 (same), 10 (last)" in caught.value.hint


def test_half_made_attempts_and_strange_names_are_passed_over(state):
    """A folder without a spec is no attempt; numbers are ordered as numbers."""
    for number in (9, 10):
        write(state, number)
    for name in ("11", "notes", ".tmp"):
        os.makedirs(state.path("attempts", name))
    assert attempts.numbers(state) == [9, 10, 11]
    assert [attempt["attempt"] for attempt in attempts.listing(state)] == [9, 10]
    assert attempts.newest(state)["attempt"] == 10


def test_the_age_does_not_follow_a_clock_that_is_set(state):
    """Within one boot a steady clock counts; after it the wall clock is all there is; never below zero."""
    assert attempts.age_s(write(state, 1, at=time.time() + 5000, monotonic=time.monotonic() - 3)) == pytest.approx(
        3, abs=1
    )
    assert attempts.age_s(write(state, 2, at=time.time() - 50, boot_id="x")) == pytest.approx(50, abs=1)
    assert attempts.age_s(write(state, 3, at=time.time() + 50, monotonic=None)) == 0


def test_a_summary_tells_size_and_cause(state, tmp_path):
    """One line of history; a log that is gone has no size."""
    log = tmp_path / "x.log"
    log.write_text("hello")

    context = SimpleNamespace(host={"name": "box"})
    crashed = write(state, 1, log=str(log), verdict={"state": "crashed", "crash": {"cause": "why"}})
    told = attempts.summary(context, crashed)
    assert (told["state"], told["cause"], told["log_bytes"], told["host"]) == ("crashed", "why", 5, "box")
    told = attempts.summary(context, write(state, 2))
    assert (told["cause"], told["log_bytes"]) == (None, None)


def test_survivors_of_an_attempt_that_was_never_alive(state):
    """Nothing carries its mark."""
    assert attempts.survivors(write(state, 1, run=GONE)) == []
    assert attempts.live(state) == []
