"""One mutating command at a time per host: a kernel lock that dies with its holder, and a manual hold that does not.

The lock file tells who holds it and since when; the truth is the kernel's lock alone, so a holder that was killed
leaves nothing behind. Python's file descriptors are not inherited by children, so no server keeps the lock. Where its
file is removed while it is held, the open journal names the agent at work (see `journal.author`).
"""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import time

from . import audit, journal, releases
from .failure import EXIT_LOCKED, EXIT_USAGE, Cancelled, Failure
from .shapes import NUMBER, OneOf
from .state import disk_failure

# A reading command holds the lock for moments only, to recover; a mutating one waits so long for it.
_PATIENCE_S = 3.0
# One that is ending, or was killed this moment, still has it.
_ENDING_S = 0.25

_HOLD = {"operator": str, "message": OneOf((str, None)), "since": NUMBER}


@contextlib.contextmanager
def exclusive(context):
    """Hold the host for a mutating operation; an unfinished transaction is recovered first.

    Raises:
        Failure: Locked by another command or held by another operator (exit 4), or by another name of this same
            machine in the same command (kind `alias`).
    """
    from . import recover

    context.state.create()
    handle = _acquire(context)
    context.lock_handle = handle
    try:
        _respect_hold(context)
        recover.recover(context)
        yield
    finally:
        context.lock_handle = None
        _release(handle)


def require(context):
    """Before a transaction is opened: that the lock which this command holds is still the host's.

    Raises:
        Failure: Its file was removed: others may hold another one by now (kind `lock-lost`).
    """
    handle = getattr(context, "lock_handle", None)
    if handle is not None and not _is_in_place(handle, context.state):
        raise Failure(
            "%s was removed while this command held it" % context.state.path("lock"),
            kind="lock-lost",
            hint="the same command again; the lock of a killed command is gone by itself, its file is never in the way",
        )


def reading(context):
    """For a reading operation: recover when a transaction was left open and nobody is at work on it.

    Returns:
        None, or {operator, command, since, ...} of a push that is in progress.
    """
    from . import recover

    if not any(os.path.exists(context.state.path(name)) for name in ("journal.json", "staging")):
        return None
    handle = _open(context)
    if not _try(handle):
        os.close(handle)
        return holder(context.state) or _somebody()
    busy = journal.author(context.state)
    if busy is not None or not _is_in_place(handle, context.state):
        os.close(handle)
        return busy or _somebody()
    try:
        _sign(handle, context, mutating=False)
        recover.recover(context)
    finally:
        _release(handle)
    return None


def _open(context):
    path = context.state.path("lock")
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise disk_failure(error, path) from error


def _try(handle):
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN):
            return False
        raise Failure(
            "the file system of the state directory cannot lock files: %s" % error.strerror,
            kind="no-locks",
            hint="set `state_dir:` of this host to a folder on a local disk",
        ) from error
    return True


def _is_in_place(handle, state):
    """Whether a lock file is the one that others would open, or was removed."""
    mine = os.fstat(handle)
    try:
        theirs = os.stat(state.path("lock"))
    except OSError:
        return False
    return (mine.st_dev, mine.st_ino) == (theirs.st_dev, theirs.st_ino)


def _sign(handle, context, mutating):
    """Write who holds the lock into it; a full disk does not matter, the kernel's lock is the truth."""
    particulars = {
        "operator": context.operator,
        "host": context.host.get("name"),
        "pid": os.getpid(),
        "command": context.command,
        "run_id": context.run_id,
        "transaction": context.args.get("transaction"),
        "since": time.time(),
        "mutating": mutating,
    }
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(particulars).encode("ascii"), 0)
    except OSError as error:
        context.wire.event("warning", text="the lock does not say who holds it: %s" % error.strerror)


def _release(handle):
    """Let go; a lock file that still named us would be shown to those who meet the next holder in its first moment."""
    try:
        os.ftruncate(handle, 0)
    except OSError:
        pass  # a read-only disk: the lock is let go all the same
    os.close(handle)


def _acquire(context):
    began = time.monotonic()
    while True:
        handle = _open(context)
        try:
            if not _try(handle):
                found = holder(context.state) or {}
            elif _is_in_place(handle, context.state):
                found = journal.author(context.state)
                if found is None:
                    _sign(handle, context, mutating=True)
                    return handle
            else:
                found = {}
            _give_up(context, found, time.monotonic() - began)
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
        time.sleep(0.02)


def _give_up(context, found, waited_s):
    """Raise when there is no use in waiting for the holder: it is at work, or is ourselves by another name."""
    ours = bool(context.run_id) and found.get("run_id") == context.run_id
    if ours and found.get("host") != context.host.get("name"):
        raise Failure("the same machine as %s" % found.get("host"), kind="alias", alias_of=found.get("host"))
    at_work = found.get("mutating") and _lives(found)
    if waited_s > (_ENDING_S if at_work else _PATIENCE_S):
        raise _locked(found or _somebody())
    if context.wire.cancelled.is_set():
        raise Cancelled


def _lives(found):
    """Whether the process that signed the lock lives: the lock itself may be in other hands by now."""
    try:
        os.kill(found["pid"], 0)
    except ProcessLookupError:
        return False
    except (OSError, KeyError, TypeError):
        return True  # another user's, or not told
    return True


def _somebody():
    return {"operator": "unknown", "command": "unknown", "since": time.time()}


def holder(state):
    """Who wrote the lock file last, or None."""
    try:
        with open(state.path("lock"), encoding="utf-8") as source:
            found = json.load(source)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def current_holder(state):
    """Who holds the kernel lock right now, or is at work without it, or None; takes nothing."""
    try:
        handle = os.open(state.path("lock"), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return journal.author(state)
    try:
        if _try(handle):
            return journal.author(state)
        return holder(state) or _somebody()
    finally:
        os.close(handle)


def _locked(found):
    return Failure(
        "locked by %s (%s, pid %s), for %s"
        % (
            found.get("operator", "somebody"),
            found.get("command", "a command"),
            found.get("pid", "unknown"),
            _age(found.get("since")),
        ),
        kind="locked",
        hint="wait for it to end; a killed holder's lock is gone by itself (deployctl lock show)",
        exit_code=EXIT_LOCKED,
        status="locked",
        holder=found,
    )


def hold_of(state):
    """The manual hold {operator, message, since}, or None.

    Raises:
        Failure: Its file is damaged (exit 8).
    """
    try:
        return releases.checked(state, ("hold.json",), _HOLD)
    except Failure as failure:
        failure.hint = "on the host: rm '%s'; whoever held it must hold it again" % state.path("hold.json")
        raise


def _respect_hold(context):
    hold = hold_of(context.state)
    if hold is None:
        return
    if hold.get("operator") == context.operator:
        context.wire.event("warning", text="you hold this host: %s" % (hold.get("message") or "no message"))
        return
    raise _held(hold)


def _age(since):
    """How long ago, in the unit that people would use."""
    if not isinstance(since, (int, float)):
        return "an unknown time"
    seconds = max(0, int(time.time() - since))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return "%d %s" % (seconds // size, unit)
    return "%d s" % seconds


def _held(hold):
    return Failure(
        "held by %s for %s: %s" % (hold.get("operator"), _age(hold.get("since")), hold.get("message") or "no message"),
        kind="held",
        hint="ask %s, or: deployctl lock release --force" % hold.get("operator"),
        exit_code=EXIT_LOCKED,
        status="locked",
        hold=hold,
    )


def lock_operation(context):
    """`acquire` (with a message), `release` (of another's hold with `force`), or `show`."""
    action = context.args.get("action")
    if action == "show":
        return {"status": "ok", "hold": hold_of(context.state), "holder": current_holder(context.state)}
    if action not in ("acquire", "release"):
        raise Failure("unknown action %r" % action, kind="usage", exit_code=EXIT_USAGE)
    context.state.create()
    handle = _acquire(context)
    try:
        hold = hold_of(context.state)
        others = hold is not None and hold.get("operator") != context.operator
        if others and not (action == "release" and context.args.get("force")):
            raise _held(hold)
        if action == "acquire":
            message = " ".join((context.args.get("message") or "").split())  # shown in lists of one line each
            hold = {"operator": context.operator, "message": message, "since": time.time()}
            context.state.write_json(hold, "hold.json")
            result: dict = {"status": "held", "hold": hold}
        elif hold is None:
            result = {"status": "unchanged", "hold": None}
        else:
            os.unlink(context.state.path("hold.json"))
            result = {"status": "released", "hold": hold}
        audit.record(context, result)
    finally:
        _release(handle)
    return result


def machine_identity(state):
    """The random id of this state directory, made at first need; it marks our servers' environments."""
    known = state.read_json("machine")
    if known is None:
        known = {"id": secrets.token_hex(8)}
        state.write_json(known, "machine")
    return known["id"]
