"""Attempts as they lie in the state directory, and what can be said of one right now.

attempts/<n>/spec.json     what was asked: profile, argv, log, release, port, marker (written by launch)
attempts/<n>/run.json      server and keeper: pid, start time (written by the keeper)
attempts/<n>/exit.json     exit status or signal (written by the keeper)
attempts/<n>/orphans.json  what lived on when the server ended: pids and start times (written by the keeper)
attempts/<n>/verdict.json  state, phases, ready_seconds, smoke, crash (written by whoever watched)
"""

import collections
import contextlib
import fcntl
import os
import time

from . import processes
from .failure import EXIT_USAGE, Failure

LOADING, READY, SMOKE_FAILED, TIMEOUT = "loading", "ready", "smoke_failed", "timeout"
CRASHED, STOPPED, UNKNOWN = "crashed", "stopped", "unknown"
FINAL = (CRASHED, STOPPED)
# Between its spec and its keeper's first record an attempt is loading; past this without a record it never started.
_KEEPER_START_S = 60.0


def numbers(state):
    """All attempt numbers, ascending."""
    try:
        names = os.listdir(state.path("attempts"))
    except OSError:
        return []
    return sorted(int(name) for name in names if name.isdigit())


def load(state, number):
    """One attempt: its spec, and `run`, `exit`, `orphans`, `verdict` as far as written; None: it was never begun."""
    spec = state.read_json("attempts", number, "spec.json")
    if spec is None:
        return None
    for part in ("run", "exit", "orphans", "verdict"):
        spec[part] = state.read_json("attempts", number, part + ".json")
    return spec


def listing(state):
    """All attempts, oldest first."""
    return [attempt for attempt in (load(state, number) for number in numbers(state)) if attempt is not None]


def newest(state):
    """The newest attempt, or None."""
    for number in reversed(numbers(state)):
        attempt = load(state, number)
        if attempt is not None:
            return attempt
    return None


def choose(state, number=None, tag=None, run_id=None):
    """The attempt that the user means: by number, the newest with a tag, that of a command, or the newest.

    Raises:
        Failure: There is none (exit 2), listing what exists.
    """
    everything = listing(state)
    if number is not None:
        chosen = [attempt for attempt in everything if attempt["attempt"] == number]
        what = "attempt %s" % number
    elif tag is not None:
        chosen = [attempt for attempt in everything if attempt["log_tag"] == tag]
        what = "attempt with the log tag %s" % tag
    elif run_id is not None:
        chosen = [attempt for attempt in everything if attempt.get("run_id") == run_id]
        what = "attempt of this command"
    else:
        chosen, what = everything, "attempt yet"
    if chosen:
        return chosen[-1]
    known = ", ".join("%d (%s)" % (attempt["attempt"], attempt["log_tag"]) for attempt in everything[-10:])
    raise Failure(
        "there is no %s on this host" % what,
        kind="unknown-attempt",
        hint="attempts: %s" % known if known else "deployctl launch --log-tag TAG",
        exit_code=EXIT_USAGE,
    )


def is_alive(attempt):
    """Whether the attempt's own server process lives on this machine and boot."""
    run = attempt["run"]
    return bool(
        run
        and run.get("pid")
        and attempt["exit"] is None
        and run["boot_id"] == processes.boot_id()
        and processes.alive(run["pid"], run["start"])
    )


def is_here(attempt):
    """Whether an attempt was launched on this machine; a shared home directory shows those of others too.

    Machines cloned from one image share /etc/machine-id, and containers of one image too: the node's name must fit as
    well.
    """
    return attempt["machine"] == processes.machine_id() and attempt.get("node") in (None, os.uname().nodename)


def age_s(attempt):
    """Seconds since the launch, on a clock that nobody sets within one boot."""
    if attempt.get("monotonic") is not None and attempt["boot_id"] == processes.boot_id():
        return max(0.0, time.monotonic() - attempt["monotonic"])
    return max(0.0, time.time() - attempt["at"])


def survivors(attempt):
    """[Process] of the attempt that live: what carries its mark, and what the living server started or leads.

    The mark is found on processes that left the group or lost their parent; the server's session and descendants are
    found even where a child cleared its environment, and what the keeper saw the server leave behind.
    """
    found = {
        process.pid: process for process, value in processes.marked(attempt["marker"]) if value == attempt["marker"]
    }
    if is_alive(attempt):
        everyone = processes.snapshot()
        server = everyone.get(attempt["run"]["pid"])
        if server is not None:
            found[server.pid] = server
            for process in processes.descendants(server.pid, everyone):
                found[process.pid] = process
            for process in everyone.values():
                if process.sid == server.pid:
                    found[process.pid] = process
    for process in left_behind(attempt):
        found.setdefault(process.pid, process)
    return list(found.values())


def left_behind(attempt):
    """[Process] that the keeper saw living when the server ended, and their descendants, as far as they live."""
    run = attempt["run"]
    if not attempt.get("orphans") or run is None or run["boot_id"] != processes.boot_id() or not is_here(attempt):
        return []
    first = [pid for pid, start in attempt["orphans"]["processes"] if processes.alive(pid, start)]
    if not first:
        return []
    everyone = processes.snapshot()
    found = {pid: everyone[pid] for pid in first if pid in everyone}
    for pid in first:
        found.update((process.pid, process) for process in processes.descendants(pid, everyone))
    return list(found.values())


def state_of(attempt):
    """The attempt's state on evidence: verdict, exit record, process, boot."""
    verdict = attempt["verdict"] or {}
    said = verdict.get("state", LOADING)
    if said in FINAL:
        return said
    if not is_here(attempt):
        return UNKNOWN  # its processes cannot be seen from here
    if is_alive(attempt):
        return said
    if attempt["run"] is None and attempt["exit"] is None and age_s(attempt) < _KEEPER_START_S:
        return LOADING  # its keeper is just starting
    return STOPPED if verdict.get("stopping") else CRASHED


@contextlib.contextmanager
def _only_writer(store, attempt):
    """One writer of a verdict at a time: a watcher and a stop may both have something to say."""
    handle = os.open(store.path("attempts", attempt["attempt"]), os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks: the window is a few milliseconds
        yield
    finally:
        os.close(handle)


def set_verdict(store, attempt, /, **fields):
    """Add to what is known of an attempt's outcome; what somebody else wrote meanwhile stays.

    A final state (crashed, stopped) is not overwritten, neither by what a slower watcher believes nor by another end.
    """
    with _only_writer(store, attempt):
        verdict = store.read_json("attempts", attempt["attempt"], "verdict.json") or {}
        if verdict.get("state") in FINAL:
            fields.pop("state", None)
        verdict.update(fields)
        verdict["at"] = time.time()
        store.write_json(verdict, "attempts", attempt["attempt"], "verdict.json")
    attempt["verdict"] = verdict


def mark_stopping(store, attempt, by):
    """Say, before the first signal, that the end to come is meant: whoever watches must not call it a crash."""
    set_verdict(store, attempt, stopping={"by": by, "at": time.time()}, by=by)


def live(state):
    """Attempts whose server process lives, oldest first."""
    return [attempt for attempt in listing(state) if is_alive(attempt)]


def summary(context, attempt):
    """One line of history or of a list of logs."""
    verdict = attempt["verdict"] or {}
    try:
        log_bytes = os.stat(attempt["log"]).st_size
    except OSError:
        log_bytes = None
    crash = verdict.get("crash")
    return {
        "attempt": attempt["attempt"],
        "log_tag": attempt["log_tag"],
        "profile": attempt["profile"],
        "release": attempt["release"],
        "patches": attempt["patches"],
        "state": state_of(attempt),
        "at": attempt["at"],
        "by": attempt["by"],
        "log": attempt["log"],
        "log_bytes": log_bytes,
        "ready_seconds": verdict.get("ready_seconds"),
        "cause": crash["cause"] if crash else None,
        "argv": attempt.get("argv"),
        "host": context.host.get("name"),
    }


def expectation(state, profile, most=5):
    """How long earlier loads of a profile took: median over the last ready ones.

    Returns:
        {"ready_seconds", "phases": {name: seconds}} or None.
    """
    ready = []
    phases = collections.defaultdict(list)
    for attempt in reversed(listing(state)):
        verdict = attempt["verdict"] or {}
        if attempt["profile"] == profile and verdict.get("ready_seconds") is not None and not verdict.get("late"):
            ready.append(verdict["ready_seconds"])
            for phase in verdict.get("phases") or []:
                phases[phase["name"]].append(phase["seconds"])
            if len(ready) == most:
                break
    if not ready:
        return None
    return {"ready_seconds": _median(ready), "phases": {name: _median(values) for name, values in phases.items()}}


def _median(values):
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
