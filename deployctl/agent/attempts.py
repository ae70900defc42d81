"""Attempts as they lie in the state directory, and what can be said of one right now.

attempts/<n>/spec.json     what was asked: profile, argv, log, release, port, marker (written by launch)
attempts/<n>/run.json      server and keeper: pid, start time (written by the keeper)
attempts/<n>/exit.json     exit status or signal (written by the keeper)
attempts/<n>/verdict.json  state, phases, ready_seconds, smoke, crash (written by whoever watched)
"""

import os
import time

from . import processes
from .failure import EXIT_USAGE, Failure

LOADING, READY, SMOKE_FAILED, TIMEOUT = "loading", "ready", "smoke_failed", "timeout"
CRASHED, STOPPED, UNKNOWN = "crashed", "stopped", "unknown"


def numbers(state):
    """All attempt numbers, ascending."""
    try:
        names = os.listdir(state.path("attempts"))
    except OSError:
        return []
    return sorted(int(name) for name in names if name.isdigit())


def load(state, number):
    """One attempt: its spec with `run`, `exit`, `verdict` (each a dict or None); None where it was never begun."""
    spec = state.read_json("attempts", number, "spec.json")
    if spec is None:
        return None
    for part in ("run", "exit", "verdict"):
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


def survivors(attempt):
    """[Process] of the attempt that live, also those that left its process group or lost their parent."""
    return [process for process, value in processes.marked(attempt["marker"]) if value == attempt["marker"]]


def state_of(attempt):
    """The attempt's state on evidence: verdict, exit record, process, boot."""
    verdict = attempt["verdict"] or {}
    said = verdict.get("state", LOADING)
    if said in (CRASHED, STOPPED):
        return said
    if attempt["machine"] != processes.machine_id():
        return UNKNOWN  # a home directory shared by machines: its processes cannot be seen from here
    if attempt["exit"] is not None:
        return CRASHED
    if is_alive(attempt):
        return said
    run = attempt["run"]
    if run is None and time.time() - attempt["at"] < 60:
        return LOADING  # its keeper is just starting
    return CRASHED


def set_verdict(store, attempt, /, **fields):
    """Add to what is known of an attempt's outcome."""
    verdict = dict(attempt["verdict"] or {})
    verdict.update(fields)
    verdict["at"] = time.time()
    attempt["verdict"] = verdict
    store.write_json(verdict, "attempts", attempt["attempt"], "verdict.json")


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
        "host": context.host.get("name"),
    }


def expectation(state, profile, most=5):
    """How long earlier loads of a profile took: median over the last ready ones.

    Returns:
        {"ready_seconds", "phases": {name: seconds}} or None.
    """
    ready, phases = [], {}
    for attempt in reversed(listing(state)):
        verdict = attempt["verdict"] or {}
        if attempt["profile"] == profile and verdict.get("ready_seconds") is not None:
            ready.append(verdict["ready_seconds"])
            for phase in verdict.get("phases") or []:
                phases.setdefault(phase["name"], []).append(phase["seconds"])
            if len(ready) == most:
                break
    if not ready:
        return None
    return {"ready_seconds": _median(ready), "phases": {name: _median(values) for name, values in phases.items()}}


def _median(values):
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
