"""Follows one attempt from its start to ready and smoke, or to its end, on evidence alone.

Ready is a 200 from the health URL and, for SGLang, the ready line in the log. Death is an exit record, a process that
is gone, or a terminal line followed by neither. Silence, refused connections and 503 are nothing of the kind.
"""

import os
import re
import time

from . import attempts, crash, health, phases, processes, smoke
from .failure import EXIT_CRASHED, EXIT_INTERRUPTED, EXIT_NOT_READY, EXIT_SMOKE

_TICK_S = 0.03
_CHUNK = 1 << 20
_TERMINAL_GRACE_S = 10.0
_RECORD_GRACE_S = 1.0
_STAMP = re.compile(rb"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")


class Watcher:
    """Reads an attempt's log and exit as they grow.

    Attributes:
        ended: Whether the server is gone for good (or as good as: a terminal line and its grace have passed).
        exit: exit.json, or None.
        terminal: Whether the log holds a line that means death.
        phase: phases.State.
    """

    def __init__(self, context, attempt, from_end=False):
        self._context = context
        self.attempt = attempt
        self.scanner = crash.CrashScanner()
        self.phase = phases.State(since=attempt["at"])
        self.ended = False
        self.exit = None
        self.last_line = b""
        self._buffer = b""
        self._inode = None
        self._position = 0
        self._caught_up = from_end
        self._terminal_at = None
        self._missing_since = None
        if from_end:
            try:
                found = os.stat(attempt["log"])
                self._position, self._inode = found.st_size, found.st_ino
            except OSError:
                pass  # tick() meets the same file and says so

    @property
    def terminal(self):
        """Whether a terminal line was seen."""
        return self.scanner.terminal is not None

    def tick(self):
        """Read what is new; cheap when nothing is."""
        self._look_at_exit()
        while self._read_log():
            pass
        self._caught_up = True
        if self.terminal and not self.ended:
            self._terminal_at = self._terminal_at or time.monotonic()
            if time.monotonic() - self._terminal_at > _TERMINAL_GRACE_S:
                self.ended = True

    def settle(self):
        """After a burst: a scheduler that died takes the server with it within its grace; wait for that end."""
        while self.terminal and not self.ended and not self._context.wire.cancelled.is_set():
            self.tick()
            time.sleep(_TICK_S)

    def _look_at_exit(self):
        if self.ended:
            return
        state, number = self._context.state, self.attempt["attempt"]
        if self.attempt["run"] is None:
            self.attempt["run"] = state.read_json("attempts", number, "run.json")
        self.exit = state.read_json("attempts", number, "exit.json")
        if self.exit is not None:
            self.attempt["exit"] = self.exit
            self.ended = True
            return
        run = self.attempt["run"]
        here = run is not None and run["boot_id"] == processes.boot_id()
        if run is not None and not (here and processes.alive(run["pid"], run["start"])):
            # The keeper writes its record within moments; without a keeper there will be none.
            self._missing_since = self._missing_since or time.monotonic()
            if time.monotonic() - self._missing_since > _RECORD_GRACE_S:
                self.ended = True

    def _read_log(self):
        """Read one chunk; whether there may be more."""
        try:
            found = os.stat(self.attempt["log"])
            if self._inode is not None and (found.st_ino != self._inode or found.st_size < self._position):
                self._position = 0  # rotated or truncated under us
            self._inode = found.st_ino
            if found.st_size == self._position:
                return False
            with open(self.attempt["log"], "rb") as source:
                source.seek(self._position)
                chunk = source.read(_CHUNK)
        except OSError:
            return False
        self._position += len(chunk)
        lines = crash.split(self._buffer + chunk)
        self._buffer = lines.pop()[-65536:]
        for line in lines:
            self._take(line)
        return len(chunk) == _CHUNK

    def _take(self, line):
        self.scanner.feed(line)
        if line.strip():
            self.last_line = line
        self.phase, events = phases.advance(self.phase, line, self._when(line))
        for event in events:
            kind = event.pop("event")
            self._context.wire.event(kind, **event)

    def _when(self, line):
        """Now for lines as they come; for those written before we attached, their own time stamp."""
        if self._caught_up:
            return time.time()
        match = _STAMP.match(line)
        if match is None:
            return self.phase.since
        stamp = time.mktime(time.strptime(match.group(1).decode(), "%Y-%m-%d %H:%M:%S"))
        return max(self.phase.since, stamp)


def wait(context):
    """Attach to the newest (or the named) attempt until it is ready, dead, or out of time."""
    from . import lock  # noqa: PLC0415

    lock.reading(context)
    attempt = attempts.choose(context.state, context.args.get("attempt"), run_id=context.args.get("run_id"))
    announce(context, attempt)
    return follow(context, attempt)


def announce(context, attempt):
    """Tell which attempt this is, and how long such a load took before."""
    context.wire.event(
        "attempt",
        attempt=attempt["attempt"],
        log=attempt["log"],
        log_tag=attempt["log_tag"],
        profile=attempt["profile"],
        pid=(attempt["run"] or {}).get("pid"),
        release=attempt["release"],
        patches=attempt["patches"],
        since=attempt["at"],
    )
    expected = attempts.expectation(context.state, attempt["profile"])
    if expected:
        context.wire.event("expect", **expected)


def follow(context, attempt):
    """Watch to the verdict, smoke included.

    Returns:
        The host's result; `state` is one of the contract's attempt states.
    """
    args = context.args
    watcher = Watcher(context, attempt)
    known = (attempt["verdict"] or {}).get("state")
    if known in (attempts.CRASHED, attempts.STOPPED):
        return _known(attempt)
    if args.get("watch") == "alive":
        return _follow_alive(context, attempt, watcher)
    timeout_s = args.get("timeout_s") or attempt["ready"]["timeout_s"]
    deadline = time.monotonic() + max(0.0, timeout_s - (time.time() - attempt["at"] if args.get("resumed") else 0.0))
    probe = health.Probe(attempt["ready"]["url"], health.authorization(attempt["argv"]))
    last_status = None
    try:
        while True:
            watcher.tick()
            if watcher.ended:
                return conclude_death(context, attempt, watcher)
            if probe.status != last_status:
                last_status = probe.status
                context.wire.event("health", status=last_status)
            if probe.healthy.is_set() and (attempt["engine"] != "sglang" or watcher.phase.ready_line):
                break
            if context.wire.cancelled.is_set():
                return _detached(context, attempt, watcher)
            if time.monotonic() > deadline:
                return _timeout(context, attempt, watcher, timeout_s, last_status)
            time.sleep(_TICK_S)
    finally:
        probe.stop()
    return _ready(context, attempt, watcher)


def _known(attempt):
    """A wait for an attempt whose end is known already."""
    verdict = attempt["verdict"]
    crashed = verdict["state"] == attempts.CRASHED
    result = {"state": verdict["state"], "status": verdict["state"], "exit": EXIT_CRASHED if crashed else 1}
    result["crash"] = verdict.get("crash")
    result["error"] = {
        "kind": verdict["state"],
        "message": "attempt %d (%s) has %s: %s"
        % (
            attempt["attempt"],
            attempt["log_tag"],
            verdict["state"],
            (verdict.get("crash") or {}).get("cause") or verdict.get("reason") or "",
        ),
        "hint": "deployctl logs --attempt %d" % attempt["attempt"],
    }
    return _with_particulars(result, attempt, verdict.get("phases") or [], verdict.get("ready_seconds"))


def _with_particulars(result, attempt, phase_list, ready_seconds):
    for key in ("attempt", "log_tag", "log", "profile", "release", "patches", "port"):
        result[key] = attempt[key]
    result["pid"] = (attempt["run"] or {}).get("pid")
    result["url"] = health.base_of(attempt["ready"]["url"])
    result["phases"] = phase_list
    result["ready_seconds"] = ready_seconds
    result.setdefault("smoke", None)
    result.setdefault("crash", None)
    result["status"] = result["state"]
    return result


def _ready(context, attempt, watcher):
    seconds = round(time.time() - attempt["at"], 3)
    known = attempt["verdict"] or {}
    ready_seconds = known.get("ready_seconds") or seconds
    phase_list = phases.as_list(watcher.phase)
    if known.get("ready_seconds") is not None:
        phase_list = known.get("phases") or phase_list
    attempts.set_verdict(context.state, attempt, state=attempts.READY, phases=phase_list, ready_seconds=ready_seconds)
    context.wire.event("ready", seconds=ready_seconds)
    wanted = attempt["smoke"] if context.args.get("smoke", True) else None
    if wanted is None:
        return _with_particulars({"state": attempts.READY}, attempt, phase_list, ready_seconds)
    burst = context.args.get("burst")
    result = smoke.run(context, attempt, wanted, wanted.get("burst", 0) if burst is None else burst, watcher)
    watcher.settle()
    return conclude_smoke(context, attempt, watcher, result)


def conclude_smoke(context, attempt, watcher, outcome):
    """The verdict after a smoke: ready, smoke_failed, or crashed when it brought the server down."""
    watcher.tick()
    verdict = attempt["verdict"] or {}
    if watcher.ended:
        result = conclude_death(context, attempt, watcher)
        result["smoke"] = outcome
        return result
    state = attempts.READY if outcome["ok"] else attempts.SMOKE_FAILED
    attempts.set_verdict(context.state, attempt, state=state, smoke=outcome)
    result = {"state": state, "smoke": outcome}
    if not outcome["ok"]:
        result["exit"] = EXIT_SMOKE
        result["error"] = {
            "kind": "smoke",
            "message": outcome["problem"],
            "hint": "the server is left running: deployctl logs, then deployctl stop or deployctl rollback",
        }
    return _with_particulars(result, attempt, verdict.get("phases") or [], verdict.get("ready_seconds"))


def conclude_death(context, attempt, watcher):
    """The verdict over a server that is gone: crashed, or stopped when somebody asked for it."""
    watcher.tick()
    attempt["verdict"] = context.state.read_json("attempts", attempt["attempt"], "verdict.json")
    verdict = attempt["verdict"] or {}
    phase_list = verdict.get("phases") or phases.as_list(watcher.phase)
    if verdict.get("state") == attempts.STOPPED:
        result = {"state": attempts.STOPPED, "exit": 1}
        result["error"] = {
            "kind": "stopped",
            "message": "attempt %d was stopped by %s" % (attempt["attempt"], verdict.get("by") or "somebody"),
            "hint": "deployctl history",
        }
        return _with_particulars(result, attempt, phase_list, verdict.get("ready_seconds"))
    scanner = watcher.scanner
    if scanner.cause() is None:
        # Attached at the end of the log, or the cause lies before it: look at the whole.
        scanner = crash.scan_log(attempt["log"])
    found = crash.diagnose(context.state, attempt, scanner, watcher.exit)
    attempts.set_verdict(context.state, attempt, state=attempts.CRASHED, phases=phase_list, crash=found)
    context.wire.event("crash", **found)
    result = {"state": attempts.CRASHED, "exit": EXIT_CRASHED, "crash": found}
    result["error"] = {
        "kind": "crashed",
        "message": found["cause"],
        "hint": "deployctl logs --crash; deployctl rollback",
    }
    return _with_particulars(result, attempt, phase_list, verdict.get("ready_seconds"))


def _timeout(context, attempt, watcher, timeout_s, status):
    attempts.set_verdict(context.state, attempt, state=attempts.TIMEOUT, phases=phases.as_list(watcher.phase))
    last = watcher.last_line.decode("utf-8", "backslashreplace").strip()[:300]
    result = {"state": attempts.TIMEOUT, "exit": EXIT_NOT_READY}
    result["error"] = {
        "kind": "not-ready",
        "message": "not ready within %g s: phase %s, health %s, last line: %s"
        % (timeout_s, watcher.phase.phase, status or "does not answer", last or "none"),
        "hint": "it is left running: deployctl wait goes on waiting, deployctl stop ends it",
    }
    return _with_particulars(result, attempt, phases.as_list(watcher.phase), None)


def _detached(context, attempt, watcher):
    result = {"state": attempts.LOADING, "exit": EXIT_INTERRUPTED}
    result["error"] = {
        "kind": "detached",
        "message": "detached; the server goes on loading (%s)" % watcher.phase.phase,
        "hint": "deployctl wait comes back to it, deployctl stop ends it",
    }
    return _with_particulars(result, attempt, phases.as_list(watcher.phase), None)


def _follow_alive(context, attempt, watcher):
    """A rank above 0 serves nothing of its own: it counts as long as it lives, until rank 0 has decided."""
    while True:
        watcher.tick()
        if watcher.ended:
            return conclude_death(context, attempt, watcher)
        if context.wire.await_control(("enough",), 0.05) is not None:
            attempts.set_verdict(context.state, attempt, state=attempts.READY, phases=phases.as_list(watcher.phase))
            return _with_particulars({"state": attempts.READY}, attempt, phases.as_list(watcher.phase), None)
        if context.wire.cancelled.is_set():
            return _detached(context, attempt, watcher)
