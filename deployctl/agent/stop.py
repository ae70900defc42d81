"""Ends a server and everything it started, and says stopped only when nothing of it lives."""

from . import attempts, audit, gpu, lock, processes
from .failure import Failure


def stop(context):
    """Stop the named attempt, or every attempt of ours that lives, orphans included."""
    with lock.exclusive(context):
        try:
            result = _stop(context)
        except Failure as failure:
            audit.record(context, failure.as_result())
            raise
        audit.record(context, result)
    return result


def _stop(context):
    number = context.args.get("attempt")
    if number is not None:
        chosen = [attempts.choose(context.state, number)]
    else:
        identity = lock.machine_identity(context.state)
        alive = {value for _, value in processes.marked(identity + ":")}
        chosen = [
            attempt
            for attempt in attempts.listing(context.state)
            if attempt["marker"] in alive or attempts.is_alive(attempt)
        ]
    stopped = [stop_attempt(context, attempt) for attempt in chosen]
    ended = [entry for entry in stopped if entry["ended"]]
    if not ended:
        return {"status": "nothing-running", "stopped": stopped}
    gpu.remove_shm_leftovers(context)
    return {"status": "stopped", "stopped": stopped, "attempt": ended[-1]["attempt"]}


def stop_attempt(context, attempt):
    """End one attempt: SIGTERM to its server, its grace, then SIGKILL to all that carries its mark.

    Returns:
        {"attempt", "log_tag", "ended": [process], "orphans": n, "note"}.

    Raises:
        Failure: Something of it still lives; names it.
    """
    grace_s = context.limit("term_grace_s", 30.0)
    patience_s = context.limit("kill_patience_s", 60.0)
    run = attempt["run"] or {}
    everything = attempts.survivors(attempt)
    launcher = [
        process for process in everything if process.pid == run.get("pid") and process.start == run.get("start")
    ]
    result = {
        "attempt": attempt["attempt"],
        "log_tag": attempt["log_tag"],
        "ended": [processes.describe(process) for process in everything],
        "orphans": 0 if launcher else len(everything),
        "note": "",
    }
    if not everything and not attempts.is_alive(attempt):
        return result
    state = attempts.state_of(attempt)
    if not launcher:
        result["note"] = "launcher dead, %d orphan%s" % (len(everything), "" if len(everything) == 1 else "s")
        context.wire.event("step", name="stop", state="start", text=result["note"], attempt=attempt["attempt"])
    else:
        context.wire.event("step", name="stop", state="start", attempt=attempt["attempt"])
    if launcher or attempts.is_alive(attempt):
        # Said before the end, so that whoever watches does not call it a crash.
        attempts.set_verdict(context.state, attempt, state=attempts.STOPPED, by=context.operator, was=state)

    def tell(text):
        context.wire.event("step", name="stop", state="progress", text=text)

    processes.end(launcher, grace_s, patience_s, tell)
    left = everything
    # What the launcher's own end did not take along; again, for what started meanwhile.
    for _ in range(3):
        left = attempts.survivors(attempt)
        if not left:
            break
        left = processes.end(left, 0 if launcher else min(grace_s, 5.0), patience_s, tell)
    left = attempts.survivors(attempt)
    if left:
        names = ", ".join("%d (%s, state %s)" % (p.pid, p.command[:60], p.state) for p in left[:5])
        raise Failure(
            "attempt %d is not stopped: %d process(es) still live: %s" % (attempt["attempt"], len(left), names),
            kind="not-stopped",
            hint="state D waits for a driver: look at dmesg; a process of another user needs its owner",
            survivors=[processes.describe(process) for process in left],
        )
    if (
        not launcher
        and attempts.state_of(attempt) != attempts.STOPPED
        and (attempt["verdict"] or {}).get("state") is None
    ):
        attempts.set_verdict(
            context.state, attempt, state=attempts.CRASHED, reason="its launcher died", by=context.operator
        )
    context.wire.event("step", name="stop", state="done", attempt=attempt["attempt"])
    return result
