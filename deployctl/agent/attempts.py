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
from .failure import EXIT_NEEDS_RECOVERY, EXIT_USAGE, Failure

LOADING, READY, SMOKE_FAILED, TIMEOUT = "loading", "ready", "smoke_failed", "timeout"
CRASHED, STOPPED, UNKNOWN = "crashed", "stopped", "unknown"
FINAL = (CRASHED, STOPPED)
# Between its spec and its keeper's first record an attempt is loading; past this without a record it never started.
_KEEPER_START_S = 60.0
# What every record must hold, and of which kind.
_PARTS: dict = {
    "spec": {
        "attempt": int,
        "log_tag": str,
        "profile": str,
        "log": str,
        "marker": str,
        "machine": str,
        "boot_id": str,
        "at": (int, float),
        "patches": list,
    },
    "run": {"boot_id": str},
    "exit": {"status": (int, type(None)), "signal": (str, type(None))},
    "orphans": {"processes": list},
    "verdict": {},
}


def numbers(state):
    """All attempt numbers, ascending."""
    try:
        names = os.listdir(state.path("attempts"))
    except OSError:
        return []
    return sorted(int(name) for name in names if name.isdigit())


def load(state, number):
    """One attempt: its spec, and `run`, `exit`, `orphans`, `verdict` as far as written; None: it was never begun.

    `damaged` names the records that cannot be read and count as not written. A server whose process can still be told
    by its mark has its `run` all the same.

    Raises:
        Failure: The spec is damaged (kind `record-damaged`, exit 8): nothing but its processes is known of it.
    """
    spec = _part(state, number, "spec")
    if spec is None:
        return None
    spec["damaged"] = []
    for name in ("run", "exit", "orphans", "verdict"):
        try:
            spec[name] = _part(state, number, name)
        except Failure as failure:
            spec[name] = None
            spec["damaged"].append(failure.message)
            if name == "run":
                spec["run"] = _run_by_mark(spec)
    return spec


def record(state, number, name):
    """One record of an attempt (`run`, `exit`, `orphans`, `verdict`); None: not written, or damaged."""
    try:
        return _part(state, number, name)
    except Failure:
        return None


def _part(state, number, name):
    try:
        found = state.read_json("attempts", number, name + ".json")
        if found is None:
            return None
        wrong = [key for key, kind in _PARTS[name].items() if key not in found or not isinstance(found[key], kind)]
        if not wrong:
            return found
        why = "state file %s is damaged: %s" % (state.path("attempts", number, name + ".json"), ", ".join(wrong))
    except Failure as failure:
        why = failure.message
    folder = state.path("attempts", number)
    raise Failure(
        "attempt %d: %s" % (number, why),
        kind="record-damaged",
        hint="deployctl stop ends what still runs of it; then, on the host: mv '%s' '%s.damaged'" % (folder, folder),
        exit_code=EXIT_NEEDS_RECOVERY,
    )


def _run_by_mark(spec):
    """What the keeper wrote, as far as the mark of a living server tells it; None where no keeper keeps one."""
    if spec["machine"] != processes.machine_id():
        return None
    everyone = processes.snapshot()
    # What the server left without a parent has the same mark and, while the keeper lives, the same parent: younger.
    for process, value in sorted(processes.marked(spec["marker"]), key=lambda found: (-found[0].age_s, found[0].pid)):
        keeper = everyone.get(process.ppid)
        if value == spec["marker"] and keeper is not None and "keeper.py" in keeper.command:
            return {
                "pid": process.pid,
                "start": process.start,
                "pgid": process.pid,
                "keeper_pid": keeper.pid,
                "keeper_start": keeper.start,
                "boot_id": processes.boot_id(),
            }
    return None


def unrecorded(state, known):
    """Attempts of which nothing is left but living processes with our mark, as far as the mark tells them.

    Args:
        state: The state directory.
        known: Numbers of the attempts whose records can be read.
    """
    machine = state.read_json("machine")
    if machine is None:
        return []  # nothing was ever launched from this state directory
    markers = {value for _, value in processes.marked(machine["id"] + ":")}
    found = []
    for marker in sorted(markers):
        number = marker.rpartition(":")[2]
        if not number.isdigit() or int(number) in known:
            continue
        spec = {
            "attempt": int(number),
            "log_tag": "no record",
            "marker": marker,
            "machine": processes.machine_id(),
            "boot_id": processes.boot_id(),
        }
        spec.update({name: record(state, int(number), name) for name in ("exit", "orphans", "verdict")})
        spec["run"] = record(state, int(number), "run") or _run_by_mark(spec)
        found.append(spec)
    return found


def listing(state, damaged=None):
    """All attempts whose records can be read, oldest first; `damaged` gets a line for each record that cannot."""
    found = []
    for number in numbers(state):
        try:
            attempt = load(state, number)
        except Failure as failure:
            if damaged is not None:
                damaged.append("%s (%s)" % (failure.message, failure.hint))
            continue
        if attempt is not None:
            found.append(attempt)
            if damaged is not None:
                damaged.extend(attempt["damaged"])
    return found


def told(context, everything=listing):
    """All attempts that can be read, the damaged records told to the user."""
    damaged: list = []
    found = everything(context.state, damaged)
    for text in damaged:
        context.wire.event("warning", text=text)
    return found


def newest(state):
    """The newest attempt that can be read, or None."""
    everything = listing(state)
    return everything[-1] if everything else None


def choose(state, number=None, tag=None, run_id=None):
    """The attempt that the user means: by number, the newest with a tag, that of a command, or the newest.

    Raises:
        Failure: There is none (exit 2), listing what exists; or the one that is meant cannot be read (exit 8).
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
        begun = [one for one in numbers(state) if os.path.exists(state.path("attempts", one, "spec.json"))]
        number = begun[-1] if begun else None
    if number is not None and not (chosen and chosen[-1]["attempt"] == number) and number in numbers(state):
        load(state, number)  # says what is wrong with the one that was meant: another is none
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


def rebooted(attempt):
    """Whether this machine was started anew since the attempt's launch."""
    return is_here(attempt) and attempt["boot_id"] != processes.boot_id()


@contextlib.contextmanager
def _only_writer(store, attempt):
    """One writer of a verdict at a time: a watcher and a stop may both have something to say."""
    try:
        handle = os.open(store.path("attempts", attempt["attempt"]), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield False  # somebody took its records away: there is no place for a verdict
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks: the window is a few milliseconds
        yield True
    finally:
        os.close(handle)


def set_verdict(store, attempt, /, **fields):
    """Add to what is known of an attempt's outcome; what somebody else wrote meanwhile stays.

    A final state (crashed, stopped) is not overwritten, neither by what a slower watcher believes nor by another end.
    """
    with _only_writer(store, attempt) as has_place:
        verdict = record(store, attempt["attempt"], "verdict") or {}
        if verdict.get("state") in FINAL:
            fields.pop("state", None)
        verdict.update(fields)
        verdict["at"] = time.time()
        if has_place:
            store.write_json(verdict, "attempts", attempt["attempt"], "verdict.json")
    attempt["verdict"] = verdict


def mark_stopping(store, attempt, by):
    """Say, before the first signal, that the end to come is meant: whoever watches must not call it a crash."""
    set_verdict(store, attempt, stopping={"by": by, "at": time.time()}, by=by)


def live(state, damaged=None):
    """Attempts whose server process lives, oldest first; `damaged` as with `listing`."""
    return [attempt for attempt in listing(state, damaged) if is_alive(attempt)]


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
