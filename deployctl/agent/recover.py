"""Bring a tree that an interrupted transaction left behind to exactly one release."""

import os
import shutil
import time

from . import audit, journal, objects, releases, site, tree
from .failure import EXIT_NEEDS_RECOVERY, Failure


def recover(context, announce=True):
    """Finish or undo an open transaction; the lock is held. Does nothing where none is open.

    Args:
        context: Of the operation.
        announce: Whether to tell the user and the audit log: not when a transaction undoes itself.

    Returns:
        None, or {transaction, to: "before"|"after", release, displaced} of what was done.

    Raises:
        Failure: The tree cannot be put back (exit 8); the journal stays, and the next command tries again.
    """
    entry = context.state.read_json("journal.json")
    if entry is None:
        if os.path.isdir(context.state.path("staging")):
            journal.clear_staging(context)
        return None
    committed = journal.is_committed(context.state, entry)
    release = (
        releases.current(context.state) if committed else releases.load(context.state, entry["release"], entry["base"])
    )
    try:
        displaced = restore(context, entry["package_dir"], release, entry["transaction"])
        tree.sweep(entry["package_dir"], entry["at"])
    except (Failure, OSError) as error:
        raise Failure(
            "an interrupted %s left %s between two releases, and it cannot be put back: %s"
            % (entry["operation"], entry["package_dir"], getattr(error, "message", error)),
            kind="needs-recovery",
            hint="mend that, then run any deployctl command on this host: it tries again",
            exit_code=EXIT_NEEDS_RECOVERY,
        ) from error
    if not committed:
        _drop_unborn(context, entry)
    journal.clear_staging(context)
    journal.end(context)
    done = {
        "transaction": entry["transaction"],
        "to": "after" if committed else "before",
        "release": release["number"],
        "displaced": displaced,
        "operator": entry["operator"],
        "command": entry["command"],
        "age_s": max(0, time.time() - entry["at"]),
    }
    if announce:
        context.wire.event("recovered", **done)
        audit.record(
            context, {"status": "recovered", "release": release["number"], "transaction": entry["transaction"]}
        )
    return done


def _drop_unborn(context, entry):
    """A release file written by the transaction that was not committed has never existed."""
    for number in releases.numbers(context.state):
        if releases.load(context.state, number)["transaction"] == entry["transaction"]:
            os.unlink(context.state.path("releases", "%d.json" % number))


def restore(context, directory, release, transaction):
    """Put every file back that differs from `release`, whoever changed it.

    A content that is known nowhere (neither stored, nor made by the transaction) may be somebody's work: it is kept
    under STATE/displaced/.

    Returns:
        The folder of displaced files, or None.
    """
    wanted = releases.expected(context.state, release)
    index = site.load_index(context, directory)
    found, _ = tree.scan(directory, index)
    differing = tree.differences(wanted, found)
    kept = displace(context, directory, [path for path in differing if path in found], found, transaction)
    materialise(context, directory, wanted, found, differing)
    _, fresh = tree.scan(directory, index)
    site.save_index(context, directory, fresh)
    return kept


def displace(context, directory, paths, found, transaction):
    """Copy files whose content is stored nowhere to STATE/displaced/<transaction>/; returns that folder or None."""
    folder = context.state.path("displaced", transaction)
    kept = None
    for path in paths:
        if os.path.exists(objects.path_of(context.state, found[path].sha)):
            continue
        target = os.path.join(folder, path)
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        shutil.copy2(os.path.join(directory, path), target)
        kept = folder
    return kept


def materialise(context, directory, wanted, found, paths):
    """Make the files of `paths` in the live tree as `wanted` says."""
    with tree.Writer(directory, lambda: journal.checkpoint(context, "replace")) as writer:
        for path in paths:
            if path not in wanted:
                writer.remove(path)
                continue
            mode = wanted[path].mode if path not in found else None
            writer.prepare(path, objects.read(context.state, wanted[path].sha), mode)
        writer.swap()
