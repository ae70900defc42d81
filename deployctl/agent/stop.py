"""Ends a server and everything it started, and says stopped only when nothing of it lives."""

from . import attempts, audit, lock, processes, shm
from .failure import Failure, counted

# Orphans have lost the server that would have ended them in order: they get this long after SIGTERM.
_ORPHAN_GRACE_S = 5.0
_ROUNDS = 3


def stop(context):
    """Stop the named attempt, or every attempt of ours that lives, orphans included.

    Raises:
        Failure: Something of it still lives; names it.
    """
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
    everything = attempts.told(context)
    # The marks of living processes count, whatever became of the records.
    everything += attempts.unrecorded(context.state, {attempt["attempt"] for attempt in everything})
    if number is not None:
        chosen = [attempt for attempt in everything if attempt["attempt"] == number]
        chosen = chosen or [attempts.choose(context.state, number)]
        if not attempts.is_here(chosen[0]):
            raise Failure(
                "attempt %d was launched on %s, which shares this state directory" % (number, chosen[0].get("node")),
                kind="other-machine",
                hint="stop it there; give each machine a `state_dir` of its own in hosts.yaml",
            )
    else:
        identity = lock.machine_identity(context.state)
        alive = {value for _, value in processes.marked(identity + ":")}
        chosen = [
            attempt
            for attempt in everything
            if attempt["marker"] in alive or attempts.is_alive(attempt) or attempts.left_behind(attempt)
        ]
    stopped, failures = [], []
    for attempt in chosen:
        try:
            stopped.append(stop_attempt(context, attempt))
        except Failure as failure:
            failures.append(failure)  # the others are stopped all the same
    if failures:
        failures[0].fields["stopped"] = stopped
        raise failures[0]
    ended = [entry for entry in stopped if entry["ended"]]
    if not ended:
        return {"status": "nothing-running", "stopped": stopped}
    return {"status": "stopped", "stopped": stopped, "attempt": ended[-1]["attempt"]}


def stop_attempt(context, attempt):
    """End one attempt: SIGTERM to its server, its grace, then SIGKILL to all that is of it.

    Returns:
        {"attempt", "log_tag", "ended": [process], "orphans": n, "note"}.

    Raises:
        Failure: Something of it still lives; names it.
    """
    grace_s = context.limit("term_grace_s", 30.0)
    patience_s = context.limit("kill_patience_s", 60.0)
    run = attempt["run"] or {}
    family = {process.pid: process for process in attempts.survivors(attempt)}
    launcher = [
        process for process in family.values() if process.pid == run.get("pid") and process.start == run.get("start")
    ]
    result = {
        "attempt": attempt["attempt"],
        "log_tag": attempt["log_tag"],
        "ended": [processes.describe(process) for process in family.values()],
        "orphans": 0 if launcher else len(family),
        "note": "",
    }
    if not family:
        return result
    event = {"name": "stop", "attempt": attempt["attempt"]}
    if not launcher:
        result["note"] = "launcher dead, %s" % counted(len(family), "orphan")
        event["text"] = result["note"]
    context.wire.event("step", state="start", **event)
    left_open = shm.in_use_by(context, family)
    if launcher:
        attempts.mark_stopping(context.state, attempt, context.operator)

    def tell(text):
        context.wire.event("step", name="stop", state="progress", text=text)

    processes.end(launcher, grace_s, patience_s, tell)
    for _ in range(_ROUNDS):
        # Again, for what started meanwhile; and what had no mark is known from before.
        family.update((process.pid, process) for process in attempts.survivors(attempt))
        left = [process for process in family.values() if processes.alive(process.pid, process.start)]
        if not left:
            break
        processes.end(left, 0 if launcher else min(grace_s, _ORPHAN_GRACE_S), patience_s, tell)
    else:
        left = [process for process in family.values() if processes.alive(process.pid, process.start)]
    if left:
        names = ", ".join("%d (%s, %s, state %s)" % (p.pid, p.user, p.command[:60], p.state) for p in left[:5])
        raise Failure(
            "attempt %d is not stopped, %s left alive: %s"
            % (attempt["attempt"], counted(len(left), "process", "processes"), names),
            kind="not-stopped",
            hint="state D waits for a driver: look at dmesg; a process of another user needs its owner",
            attempt=attempt["attempt"],
            survivors=[processes.describe(process) for process in left],
        )
    if launcher:
        attempts.set_verdict(context.state, attempt, state=attempts.STOPPED, by=context.operator)
    else:
        attempts.set_verdict(
            context.state, attempt, state=attempts.CRASHED, reason="its launcher died", by=context.operator
        )
    shm.remove_leftovers(context, left_open)
    context.wire.event("step", name="stop", state="done", attempt=attempt["attempt"])
    return result
