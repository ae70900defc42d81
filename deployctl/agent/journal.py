"""The open transaction, written before the first change of the live tree and removed after the last.

What it promises: as long as STATE/journal.json exists, current.json decides what the tree must become. Every change of
current.json counts its `move` up by one, and the journal says which move is its own: once current.json has reached it,
the transaction was committed and only tidying is left; otherwise every file that is not as the release before says is
put back. current.json is renamed into place exactly once per transaction: that rename is the commit.
"""

import hashlib
import os
import shutil
import signal
import time

from . import processes, releases, writer
from .failure import EXIT_NEEDS_RECOVERY, Failure
from .shapes import OneOf
from .state import sync_folder

_LONGEST_PAUSE_S = 30.0
_KILL_PATIENCE_S = 30.0

_ENTRY = {
    "transaction": str,
    "operation": str,
    "package_dir": str,
    "release": int,
    "base": int,
    "makes": OneOf((int, None)),
    "move": int,
    "folders": {"*": (int, int, int)},
    "particulars": OneOf((None, {"*": (int, int, int, OneOf((str, None)))})),
}

# In the environment of patch scripts, so that a recovery finds those that outlived their killed agent.
SCRIPT_MARKER = "DEPLOYCTL_TRANSACTION"


def script_mark(state, transaction):
    """The marker's value: one transaction of one state directory.

    Ids are words of the client: another package's state on this machine may know the same one.
    """
    home = os.path.realpath(state.root).encode("utf-8", "surrogateescape")
    return "%s.%s" % (transaction, hashlib.sha256(home).hexdigest()[:16])


def end_scripts(context, entry):
    """End what patch scripts have left running, also outside their process groups: it would go on changing the tree.

    Raises:
        Failure: It cannot be ended (kind `will-not-end`).
    """
    wanted = script_mark(context.state, entry["transaction"])
    found = [process for process, value in processes.marked(wanted, SCRIPT_MARKER) if value == wanted]
    left = processes.end(found, 0, _KILL_PATIENCE_S)
    if left:
        raise Failure(
            "its patch script still runs (pid %s)" % ", ".join(str(process.pid) for process in left),
            kind="will-not-end",
            hint="end that process on the host",
        )


def checkpoint(context, name):
    """A boundary between two durable changes.

    The request's `crash_at: N` ends the agent by SIGKILL at the N-th boundary, and `pause_at: N` waits there until the
    client has gone: the tests that prove recovery enumerate them all this way.
    """
    count = getattr(context, "checkpoints", 0) + 1
    context.checkpoints = count
    if context.args.get("pause_at") == count:
        context.wire.event("paused", at=count, name=name)
        context.wire.cancelled.wait(_LONGEST_PAUSE_S)
    if context.args.get("crash_at") == count:
        context.wire.event("crash-test", at=count, name=name)
        os.kill(os.getpid(), signal.SIGKILL)


def begin(context, transaction, site, number):
    """Open the journal: from here on the tree of the site's release is restored unless the transaction is committed.

    Args:
        context: Of the operation.
        transaction: Its id.
        site: The package as found.
        number: The release that the transaction would make, or None for a rollback.
    """
    checkpoint(context, "before journal")
    entry = {
        "transaction": transaction,
        "operation": context.operation,
        "command": context.command,
        "operator": context.operator,
        "run_id": context.run_id,
        "host": context.host.get("name"),
        "agent": _myself(),
        "at": time.time(),
        "package_dir": site.package.directory,
        "release": site.release["number"],
        "base": site.release["base"],
        "makes": number,
        "move": releases.pointer(context.state)["move"] + 1,
        "folders": writer.folders_of(site.package.directory, [".", *site.index["folders"]]),
        "particulars": None,
        "strange": None,
    }
    context.state.write_json(entry, "journal.json")
    checkpoint(context, "journal open")
    return entry


def note_particulars(context, entry, particulars, strange):
    """Before a live script, which may do anything to the tree: remember mode, owner and link of every file.

    Args:
        context: Of the operation.
        entry: The open journal.
        particulars: From `writer.particulars`.
        strange: From `tree.strange`: what is there besides files and folders.
    """
    entry["particulars"] = particulars
    entry["strange"] = strange
    context.state.write_json(entry, "journal.json")


def read(state):
    """The open journal, or None.

    Raises:
        Failure: It is damaged (exit 8).
    """
    return releases.checked(state, ("journal.json",), _ENTRY)


def _myself():
    return {"pid": os.getpid(), "start": processes.start_time(os.getpid()), "boot": processes.boot_id()}


def author(state):
    """Who is at work on the open transaction, as a lock's holder, or None.

    The kernel's lock tells the same, unless somebody has removed its file while it was held: then the agent's process
    is what keeps others from taking an unfinished transaction for an interrupted one.
    """
    try:
        entry = state.read_json("journal.json") or {}
    except Failure:
        return None  # what is wrong with it shows when it is recovered
    agent = entry.get("agent")
    if not isinstance(agent, dict) or agent == _myself() or agent.get("boot") != processes.boot_id():
        return None
    if not isinstance(agent.get("pid"), int) or not processes.alive(agent["pid"], agent.get("start")):
        return None
    known = {key: entry.get(key) for key in ("operator", "command", "run_id", "host", "transaction")}
    return dict(known, pid=agent["pid"], since=entry.get("at"), mutating=True)


def require_own(state, entry, undoing=False):
    """Before a change: that nobody has taken the open transaction over, whatever became of the lock.

    Args:
        state: The state directory.
        entry: Of the journal that this command has opened.
        undoing: Whether a journal that is merely gone will do, with the release before still the current one.

    Raises:
        Failure: It is another's by now (kind `taken-over`, exit 8), and so is the tree.
    """
    found = state.read_json("journal.json")
    if found is None and releases.pointer(state)["move"] == entry["move"] - 1:
        if not undoing:
            raise Failure(
                "%s was removed while this command was at work" % state.path("journal.json"),
                kind="journal-lost",
                hint="the same command again, and leave the files in %s alone" % state.root,
            )
    elif found is None or any(found.get(key) != entry[key] for key in ("transaction", "agent")):
        raise Failure(
            "another command has taken over while this one was at work (were files in %s removed?): the package is left"
            " as that one has it" % state.root,
            kind="taken-over",
            hint="deployctl status; the lock of a killed command is gone by itself, never remove its file",
            exit_code=EXIT_NEEDS_RECOVERY,
        )


def is_committed(state, entry):
    """Whether the transaction of a journal entry was committed."""
    return releases.pointer(state)["move"] >= entry["move"]


def commit(context, release, transaction):
    """Make a release the current one: the one moment at which a transaction becomes true."""
    checkpoint(context, "before commit")
    releases.point_to(context.state, release["number"], release["base"], transaction)
    checkpoint(context, "committed")


def end(context):
    """Remove the journal."""
    try:
        os.unlink(context.state.path("journal.json"))
    except FileNotFoundError:
        pass  # nothing had been opened
    sync_folder(context.state.root)
    checkpoint(context, "journal removed")


def clear_staging(context):
    """Remove staged copies; nobody else can be using one while the lock is held."""
    shutil.rmtree(context.state.path("staging"), ignore_errors=True)
