"""What runs here, at which release, and whether anybody has edited it. A part that fails is said in its place."""

from . import attempts, crash, gpu, health, lock, package, phases, processes, releases, site, tree
from .failure import EXIT_CRASHED, EXIT_DRIFT, EXIT_NEEDS_RECOVERY

_PROBE_S = 3.0


def status(context):
    """Everything of the contract's `status`; with `check` a state that no push can work with, a drifted tree, or a
    crashed newest attempt sets the exit.
    """
    result: dict = {"status": "ok", "problems": []}
    broken: list = []
    busy = _part(result, lambda: lock.reading(context), broken)
    result["push_in_progress"] = busy
    result["hold"] = _part(result, lambda: context.state.read_json("hold.json"))
    release = _part(result, lambda: releases.current(context.state), broken)
    result["release"] = release["number"] if release else None
    result["patches"] = releases.references(release) if release else []
    result["version"] = release["version"] if release else None
    result["package_dir"] = release["package_dir"] if release else None
    result["drift"] = []
    if release is not None and not busy:
        result["drift"] = _part(result, lambda: _drift(context, release), broken) or []
    result["drift_summary"] = site.drift_words(release["number"], result["drift"]) if result["drift"] else ""
    # One damaged record hides no server that runs: it is a line of the problems.
    everything = _part(result, lambda: attempts.listing(context.state, result["problems"])) or []
    result["server"] = _part(result, lambda: _server(context, everything))
    result["orphans"] = _part(result, lambda: _orphans(context, everything)) or []
    newest = everything[-1] if everything else None
    summary = _part(result, lambda: _newest(context, newest)) if newest else None
    result["attempt"] = summary
    found = _part(result, lambda: gpu.report(context)) or {}
    result["gpus"] = found.get("gpus", [])
    result["holders"] = found.get("holders", [])
    result["tools"] = found.get("tools", {})
    hidden = _part(result, lambda: package.hidden(context, release)) if release is not None else None
    if hidden:
        result["problems"].append(hidden)
    if context.args.get("check"):
        if broken:
            result["exit"] = EXIT_NEEDS_RECOVERY
            result["error"] = _error(broken[0].kind, broken[0].message, broken[0].hint)
        elif hidden:
            result["exit"] = EXIT_DRIFT
            result["error"] = _error("other-package", hidden, "move that folder away, or rename it; deployctl doctor")
        elif result["drift"]:
            result["exit"] = EXIT_DRIFT
            result["error"] = _error(
                "drift",
                result["drift_summary"],
                "deployctl rollback --to %d --dry-run shows the differences; with --force instead it sets them aside"
                % result["release"],
            )
        elif summary is not None and summary["state"] == attempts.CRASHED:
            result["exit"] = EXIT_CRASHED
            result["error"] = _error("crashed", "attempt %d crashed" % summary["attempt"], "deployctl logs --crash")
    return result


def _newest(context, attempt):
    """The newest attempt in one line, with its cause also where nobody watched it crash."""
    found = attempts.summary(context, attempt)
    if found["state"] == attempts.CRASHED and found["cause"] is None:
        scanner = crash.scan_log(attempt["log"])
        found["cause"] = crash.diagnose(context.state, attempt, scanner, attempt["exit"])["cause"]
    return found


def _error(kind, message, hint):
    return {"kind": kind, "message": message, "hint": hint}


def _part(result, read, broken=None):
    try:
        return read()
    except Exception as error:
        # Whatever it is: the other parts are wanted all the more when one is broken.
        if broken is not None and getattr(error, "exit_code", None) == EXIT_NEEDS_RECOVERY:
            broken.append(error)
        result["problems"].append(getattr(error, "message", None) or "%s: %s" % (type(error).__name__, error))
        return None


def _drift(context, release):
    found = tree.scan(release["package_dir"], site.load_index(context, release["package_dir"]))
    wanted = releases.expected(context.state, release)
    return site.drift_list(context, release, wanted, found[0], tree.differences(wanted, found[0]))


def _server(context, everything):
    """The newest attempt whose server lives, else None."""
    for attempt in reversed(everything):
        if not attempts.is_alive(attempt):
            continue
        state = attempts.state_of(attempt)
        phase = None
        if state in (attempts.LOADING, attempts.TIMEOUT):
            phase = _phase(attempt)
            if _is_ready(context, attempt, phase):
                state = attempts.READY
        return {
            "attempt": attempt["attempt"],
            "log_tag": attempt["log_tag"],
            "profile": attempt["profile"],
            "state": state,
            "phase": phase.phase if phase and state != attempts.READY else None,
            "pid": attempt["run"]["pid"],
            "port": attempt["port"],
            "url": health.base_of(attempt["ready"]["url"]),
            "since": attempt["at"],
            "uptime_s": round(attempts.age_s(attempt), 1),
            "release": attempt["release"],
            "log": attempt["log"],
        }
    return None


def _phase(attempt):
    state = phases.State(since=attempt["at"], every_rank=attempt["rank"] > 0)
    try:
        with open(attempt["log"], "rb") as source:
            for block in crash.blocks(source.read(32 << 20)):
                if phases.quiet(state, block):
                    continue
                for line in crash.split(block):
                    state, _ = phases.advance(state, line, attempt["at"])
    except OSError:
        pass  # a log that somebody moved away: the server is there all the same
    return state


def _is_ready(context, attempt, phase):
    """A load that nobody watched, or that was given up on, may be ready by now: ask it."""
    if attempt["engine"] == "sglang" and attempt["rank"] == 0 and not phase.ready_line:
        return False
    try:
        code, _ = health.request(
            attempt["ready"]["url"], timeout_s=_PROBE_S, headers=health.authorization(attempt["argv"])
        )
    except Exception:
        return False  # no answer in time is no evidence of anything
    return bool(code == 200)


def _orphans(context, everything):
    """Processes of attempts whose launcher is gone, or whose records are."""
    alive = {attempt["attempt"] for attempt in everything if attempts.is_alive(attempt)}
    known = {attempt["attempt"] for attempt in everything}
    lost = attempts.unrecorded(context.state, known)
    headed = {attempt["attempt"] for attempt in lost if attempts.is_alive(attempt)}
    return [
        dict(
            processes.describe(process),
            attempt=number,
            note="its record cannot be read" if number in headed else "launcher dead",
        )
        for process, number in gpu.ours(context.state).values()
        if number not in alive
    ]
