"""Follows one attempt from its start to ready and smoke, or to its end, on evidence alone.

Ready is a 200 from the health URL and, for SGLang, the ready line in the log. What counts as death is `watcher`'s.
"""

import time

from . import attempts, crash, health, lock, phases, smoke
from .failure import EXIT_CRASHED, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_NOT_READY, EXIT_SMOKE, Failure
from .watcher import SETTLE_S, TICK_S, Watcher

# How long a wait looks for the attempt of a launch that may still be at its preparations.
_LAUNCH_PATIENCE_S = 120.0
# A load that was watched from the beginning: its ready time was seen and not deduced.
_FROM_START_S = 5.0


def wait(context):
    """Attach to the newest (or the named) attempt until it is ready, dead, or out of time.

    Stateless: may be asked again after a lost link, and by several at once. With `wait: false` it only says how the
    attempt stands.
    """
    lock.reading(context)
    args = context.args
    attempt = (
        _attempt_of_command(context) if args.get("run_id") else attempts.choose(context.state, args.get("attempt"))
    )
    announce(context, attempt)
    if not args.get("wait", True) and attempts.state_of(attempt) in (attempts.LOADING, attempts.READY):
        verdict = attempt["verdict"] or {}
        return describe(
            {"state": attempts.state_of(attempt)}, attempt, verdict.get("phases") or [], verdict.get("ready_seconds")
        )
    return follow(context, attempt)


def _attempt_of_command(context):
    """The attempt of a launch whose link broke; while that launch still holds the lock, it may be about to start it."""
    finish = time.monotonic() + _LAUNCH_PATIENCE_S
    while True:
        holder = lock.current_holder(context.state)
        try:
            return attempts.choose(context.state, run_id=context.args["run_id"])
        except Failure:
            at_work = holder is not None and holder.get("run_id") == context.args["run_id"]
            if not at_work or time.monotonic() > finish or context.wire.cancelled.is_set():
                raise
        time.sleep(0.05)


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
        elapsed_s=round(attempts.age_s(attempt), 3),
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
    verdict = attempt["verdict"] or {}
    if verdict.get("state") in attempts.FINAL:
        return _known(attempt)
    if not attempts.is_here(attempt):
        return _elsewhere(attempt)
    was_ready = verdict.get("ready_seconds") is not None
    watcher = Watcher(context, attempt, from_end=was_ready)
    if args.get("watch") == "alive":
        return _follow_alive(context, attempt, watcher)
    timeout_s = args.get("timeout_s")
    timeout_s = attempt["ready"]["timeout_s"] if timeout_s is None else timeout_s
    deadline = time.monotonic() + timeout_s - (attempts.age_s(attempt) if args.get("resumed") else 0.0)
    # Ranks above 0 serve a health URL of their own and never print the line.
    needs_line = attempt["engine"] == "sglang" and attempt["rank"] == 0 and not was_ready
    from_start = attempts.age_s(attempt) < _FROM_START_S
    probe = health.Probe(attempt["ready"]["url"], health.authorization(attempt["argv"]))
    last_status = None
    poked = False
    try:
        while True:
            watcher.tick()
            if watcher.ended:
                return conclude_death(context, attempt, watcher)
            if probe.status != last_status:
                last_status = probe.status
                context.wire.event("health", status=last_status)
            if probe.healthy.is_set() and not (needs_line and not watcher.phase.ready_line) and not watcher.doomed:
                break
            if watcher.phase.ready_line and not poked:
                poked = True
                probe.ask_now()
            if context.wire.cancelled.is_set():
                return _detached(attempt, watcher)
            # One that is doomed is not left running: its end comes within its grace, and is named.
            if time.monotonic() > deadline + (SETTLE_S if watcher.doomed else 0) and probe.status is not None:
                return _timeout(context, attempt, watcher, timeout_s, last_status)
            if not watcher.behind:
                time.sleep(TICK_S)
    finally:
        probe.stop()
    return _ready(context, attempt, watcher, from_start)


def _known(attempt):
    """A wait for an attempt whose end is known already."""
    verdict = attempt["verdict"]
    crashed = verdict["state"] == attempts.CRASHED
    result = {"state": verdict["state"], "exit": EXIT_CRASHED if crashed else EXIT_FAILED}
    result["crash"] = verdict.get("crash")
    result["smoke"] = verdict.get("smoke")
    why = (verdict.get("crash") or {}).get("cause") or verdict.get("reason")
    if crashed:
        said = "attempt %d (%s) has crashed: %s" % (attempt["attempt"], attempt["log_tag"], why or "no cause is known")
    else:
        said = "attempt %d (%s) was stopped by %s" % (
            attempt["attempt"],
            attempt["log_tag"],
            verdict.get("by") or "somebody",
        )
    result["error"] = {
        "kind": verdict["state"],
        "message": said,
        "hint": "deployctl logs --attempt %d%s" % (attempt["attempt"], " --crash" if crashed else ""),
    }
    return describe(result, attempt, verdict.get("phases") or [], verdict.get("ready_seconds"))


def _elsewhere(attempt):
    """An attempt in a home directory that several machines share."""
    result = {"state": attempts.UNKNOWN, "exit": EXIT_FAILED}
    result["error"] = {
        "kind": "other-machine",
        "message": "attempt %d (%s) was launched on %s, which shares this state directory"
        % (attempt["attempt"], attempt["log_tag"], attempt.get("node") or "another machine"),
        "hint": "give each machine a `state_dir` of its own in hosts.yaml",
    }
    return describe(result, attempt, [], None)


def describe(result, attempt, phase_list, ready_seconds):
    """A host's result with the attempt's particulars; `status` repeats `state`."""
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


def _ready(context, attempt, watcher, from_start):
    verdict = attempt["verdict"] or {}
    ready_seconds, phase_list = verdict.get("ready_seconds"), verdict.get("phases")
    fields = {}
    if ready_seconds is None:
        if not watcher.phase.ready_line:
            watcher.phase, done = phases.close(watcher.phase, watcher.now())
            context.wire.event(done.pop("event"), **done)
        # Attached after it was ready: the ready line's own stamp says when. Without one the time is an upper bound.
        at = watcher.phase.since if watcher.late else watcher.now()
        ready_seconds, phase_list = round(at - attempt["at"], 3), phases.as_list(watcher.phase)
        if not from_start and not watcher.phase.ready_line:
            fields["late"] = True
    attempts.set_verdict(
        context.state, attempt, state=attempts.READY, phases=phase_list, ready_seconds=ready_seconds, **fields
    )
    context.wire.event("ready", seconds=ready_seconds)
    wanted = attempt["smoke"] if context.args.get("smoke", True) and attempt["rank"] == 0 else None
    # The ranks as they are now: one that dies of the first request must be known to have lived.
    watcher.settle()
    if watcher.ended:
        return conclude_death(context, attempt, watcher)
    if wanted is None:
        return describe({"state": attempts.READY}, attempt, phase_list, ready_seconds)
    burst = context.args.get("burst")
    outcome = smoke.run(context, attempt, wanted, wanted.get("burst", 0) if burst is None else burst, watcher)
    return conclude_smoke(context, attempt, watcher, outcome)


def conclude_smoke(context, attempt, watcher, outcome):
    """The verdict after a smoke: ready, smoke_failed, or crashed when it brought the server down.

    Args:
        context: Of the operation.
        attempt: The attempt.
        watcher: Its Watcher.
        outcome: What smoke.run returned; nothing is concluded from one that was cancelled.
    """
    if context.wire.cancelled.is_set():
        return _detached(attempt, watcher)
    watcher.settle()
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
            "hint": "the server is left running: deployctl logs, then deployctl stop" + _or_back(attempt, " or "),
        }
    return describe(result, attempt, verdict.get("phases") or [], verdict.get("ready_seconds"))


def conclude_death(context, attempt, watcher):
    """The verdict over a server that is gone: crashed, or stopped when somebody asked for it."""
    watcher.finish()
    attempt["verdict"] = attempts.record(context.state, attempt["attempt"], "verdict")
    verdict = attempt["verdict"] or {}
    phase_list = verdict.get("phases") or phases.as_list(watcher.phase)
    if verdict.get("state") != attempts.CRASHED and (
        verdict.get("stopping") or verdict.get("state") == attempts.STOPPED
    ):
        attempts.set_verdict(context.state, attempt, state=attempts.STOPPED, phases=phase_list)
        return _known(attempt)
    found = _diagnose(context, attempt, watcher)
    attempts.set_verdict(context.state, attempt, state=attempts.CRASHED, phases=phase_list, crash=found)
    context.wire.event("crash", **found)
    result = {"state": attempts.CRASHED, "exit": EXIT_CRASHED, "crash": found}
    hint = "deployctl logs --crash" + _or_back(attempt, "; ")
    if attempts.is_alive(attempt):
        hint = "what is left of it still runs: deployctl stop; " + hint
    result["error"] = {"kind": "crashed", "message": found["cause"], "hint": hint}
    return describe(result, attempt, phase_list, verdict.get("ready_seconds"))


def _or_back(attempt, joint):
    """The offer to roll back, where the attempt ran patches that can be taken away."""
    return joint + "deployctl rollback" if attempt["release"] else ""


def _diagnose(context, attempt, watcher):
    scanner = watcher.scanner
    if scanner.cause() is None:
        # Attached at the end of the log, or the cause lies before it: look at the whole.
        scanner = crash.scan_log(attempt["log"])
    found = crash.diagnose(context.state, attempt, scanner, watcher.exit)
    lost = watcher.lost_rank
    if lost is not None and watcher.exit is None and not watcher.rebooted and scanner.cause() is None:
        found["cause"] = "%s is gone; the server lives on without it" % lost
    return found


def _timeout(context, attempt, watcher, timeout_s, status):
    attempts.set_verdict(context.state, attempt, state=attempts.TIMEOUT, phases=phases.as_list(watcher.phase))
    last = watcher.last_line.decode("utf-8", "backslashreplace").strip()[:300]
    result = {"state": attempts.TIMEOUT, "exit": EXIT_NOT_READY}
    result["error"] = {
        "kind": "not-ready",
        "message": "not ready within %g s: phase %s, health %s, last line: %s%s"
        % (
            timeout_s,
            watcher.phase.phase,
            status or "does not answer",
            last or "none",
            "; %s" % watcher.log_fault if watcher.log_fault else "",
        ),
        "hint": "it is left running: deployctl wait goes on waiting, deployctl stop ends it",
    }
    return describe(result, attempt, phases.as_list(watcher.phase), None)


def _detached(attempt, watcher):
    """Nobody listens any more: the server is left as it is, and so is its verdict."""
    verdict = attempt["verdict"] or {}
    state = attempts.READY if verdict.get("ready_seconds") is not None else attempts.LOADING
    doing = "is ready, its smoke was not finished" if state == attempts.READY else "goes on loading"
    result = {"state": state, "exit": EXIT_INTERRUPTED}
    result["error"] = {
        "kind": "detached",
        "message": "detached; the server %s (%s)" % (doing, watcher.phase.phase),
        "hint": "deployctl wait comes back to it, deployctl stop ends it",
    }
    return describe(result, attempt, phases.as_list(watcher.phase), verdict.get("ready_seconds"))


def _follow_alive(context, attempt, watcher):
    """A rank above 0 serves nothing of its own: it counts as long as it lives, until rank 0 has decided."""
    while True:
        watcher.tick()
        if watcher.ended:
            return conclude_death(context, attempt, watcher)
        if context.wire.await_control(("enough",), TICK_S) is not None:
            attempts.set_verdict(context.state, attempt, state=attempts.READY, phases=phases.as_list(watcher.phase))
            return describe({"state": attempts.READY}, attempt, phases.as_list(watcher.phase), None)
        if context.wire.cancelled.is_set():
            return _detached(attempt, watcher)
