"""The open transaction, written before the first change of the live tree and removed after the last.

What it promises: as long as STATE/journal.json exists, current.json decides what the tree must become. If
current.json names the journal's transaction, the transaction was committed and only tidying is left; otherwise every
file that is not as the release before says is put back. current.json is renamed into place exactly once per
transaction: that rename is the commit.
"""

import os
import shutil
import signal
import time

from .state import sync_folder


def checkpoint(context, name):
    """A boundary between two durable changes.

    The request's `crash_at: N` ends the agent by SIGKILL at the N-th boundary: the tests that prove recovery enumerate
    them all this way.
    """
    count = getattr(context, "checkpoints", 0) + 1
    context.checkpoints = count
    if context.args.get("crash_at") == count:
        context.wire.event("crash-test", at=count, name=name)
        os.kill(os.getpid(), signal.SIGKILL)


def begin(context, transaction, package_dir, release):
    """Open the journal: from here on the tree of `release` is restored unless the transaction is committed."""
    checkpoint(context, "before journal")
    context.state.write_json(
        {
            "transaction": transaction,
            "operation": context.operation,
            "command": context.command,
            "operator": context.operator,
            "run_id": context.run_id,
            "at": time.time(),
            "package_dir": package_dir,
            "release": release["number"],
            "base": release["base"],
        },
        "journal.json",
    )
    checkpoint(context, "journal open")


def is_committed(state, entry):
    """Whether the transaction of a journal entry was committed."""
    pointer = state.read_json("current.json") or {}
    return pointer.get("transaction") == entry["transaction"]


def point_to(context, release, transaction):
    """Make a release the current one. For a transaction this is the commit."""
    checkpoint(context, "before commit")
    context.state.write_json(
        {"release": release["number"], "base": release["base"], "transaction": transaction, "at": time.time()},
        "current.json",
    )
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
