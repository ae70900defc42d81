"""Bring a tree that an interrupted transaction left behind to exactly one release."""

import os
import shutil
import time

from . import audit, journal, objects, package, releases, site, tree, writer
from .failure import EXIT_NEEDS_RECOVERY, Failure
from .writer import sync_file


def recover(context):
    """Finish or undo a transaction that another command left open; the lock is held. Does nothing where none is open.

    Returns:
        None, or {transaction, to: "before"|"after"|"reinstalled", release, displaced, ...} of what was done.

    Raises:
        Failure: The tree cannot be put back (exit 8); the journal stays, and the next command tries again.
    """
    entry = journal.read(context.state)
    if entry is None:
        if os.path.isdir(context.state.path("staging")):
            journal.clear_staging(context)
        return None
    try:
        journal.end_scripts(context, entry)
        kept = None
        if journal.is_committed(context.state, entry):
            # The tree was complete before the commit: what has been edited since is somebody's work.
            to, number = "after", releases.pointer(context.state)["release"]
            writer.sweep(entry["package_dir"], entry["folders"], entry["transaction"])
        elif _was_installed_anew(context, entry):
            to, number = "reinstalled", entry["release"]
        else:
            to, number = "before", entry["release"]
            # Only a live script may have removed the package; where none ran, somebody has uninstalled it.
            kept = restore(context, entry, displacing=True, removed_by_us=entry["particulars"] is not None)
    except (Failure, OSError) as error:
        what = "an interrupted %s left %s between two releases, and it" % (entry["operation"], entry["package_dir"])
        raise _needs_recovery(what, error) from error
    close(context, entry)
    _sweep_state(context.state)
    done = {
        "transaction": entry["transaction"],
        "to": to,
        "release": number,
        "displaced": kept,
        "operator": entry.get("operator"),
        "command": entry.get("command"),
        "age_s": max(0, time.time() - entry.get("at", time.time())),
    }
    context.wire.event("recovered", **done)
    audit.record(context, {"status": "recovered", "release": number, "transaction": entry["transaction"]})
    return done


def undo(context, entry, touched, displacing):
    """Undo the transaction of this very command.

    Args:
        context: Of the operation.
        entry: Its open journal.
        touched: Whether the live tree may have been changed; otherwise it is left as it is.
        displacing: Whether contents that are known nowhere are kept: not when a script of ours has just made them.

    Returns:
        The folder of displaced files, or None.

    Raises:
        Failure: The tree cannot be put back (exit 8); the journal stays.
    """
    kept = None
    try:
        journal.end_scripts(context, entry)  # what has left the script's process group would write on
        if touched:
            kept = restore(context, entry, displacing, removed_by_us=True)
    except (Failure, OSError) as error:
        raise _needs_recovery(entry["package_dir"], error) from error
    close(context, entry)
    return kept


def _needs_recovery(what, error):
    return Failure(
        "%s cannot be put back: %s" % (what, getattr(error, "message", error)),
        kind="needs-recovery",
        hint="%s; then run any deployctl command on this host: it tries again"
        % (getattr(error, "hint", "") or "mend that"),
        exit_code=EXIT_NEEDS_RECOVERY,
    )


def close(context, entry):
    """Tidy after an undone or committed transaction; the journal goes last."""
    if entry["makes"] is not None and not journal.is_committed(context.state, entry):
        # Written by a transaction that was not committed: it has never existed.
        try:
            os.unlink(context.state.path("releases", "%d.json" % entry["makes"]))
        except FileNotFoundError:
            pass  # it had not come so far
    journal.clear_staging(context)
    journal.end(context)


def _was_installed_anew(context, entry):
    """Whether the package was replaced since by pip or git: then there is nothing to put back.

    Raises:
        Failure: It was, and it also holds what neither the new install nor the transaction put there.
    """
    try:
        found = package.locate(context)
    except Failure:
        return False  # what is wrong with it shows when the files are put back
    about = releases.base_of(context.state, entry["base"])
    if found.directory != entry["package_dir"] or found.fingerprint == about["fingerprint"]:
        return False
    entries, _ = tree.scan(found.directory)
    before = releases.expected(context.state, releases.load(context.state, entry["release"], entry["base"]))
    changed = [path for path in tree.differences(before, entries) if path in entries]
    if all(os.path.exists(objects.path_of(context.state, entries[path].sha)) for path in changed):
        return False  # the transaction's own contents alone: putting them back takes nothing away
    differing = package.differing_from_origin(found, {path: item.sha for path, item in entries.items()})
    if differing:
        raise Failure(
            "the package was installed anew meanwhile (%s to %s), and these files are not as it came: %s"
            % (about["version"], found.version, ", ".join(differing[:10])),
            kind="drift",
            hint="reinstall it once more with pip (git checkout in a work tree)",
        )
    return True


def restore(context, entry, displacing, removed_by_us):
    """Put every file back that differs from the release before, whoever changed it.

    A content that is known nowhere (neither stored, nor made by the transaction) may be somebody's work: it is kept
    under STATE/displaced/.

    Args:
        context: Of the operation.
        entry: The open journal.
        displacing: Whether such contents are kept.
        removed_by_us: Whether the package's folder is made again where it is gone.

    Returns:
        The folder of displaced files, or None.
    """
    directory, recorded = entry["package_dir"], entry["particulars"]
    wanted = releases.expected(context.state, releases.load(context.state, entry["release"], entry["base"]))
    if removed_by_us:
        writer.put_root_back(directory, entry["folders"])
    writer.put_folders_back(directory, entry["folders"])
    if recorded is not None:
        links = {path: about[3] for path, about in recorded.items() if about[3] is not None}
        links.update(entry.get("strange") or {})
        for path in tree.strange(directory):
            if path not in links:
                os.unlink(os.path.join(directory, path))  # a script's; what it leads to stays
        writer.put_links_back(directory, links, missing_too=True)
    index = site.load_index(context, directory)
    found, _ = tree.scan(directory, index)
    differing = tree.differences(wanted, found)
    kept = None
    if displacing:
        kept = displace(context, directory, [path for path in differing if path in found], found, entry["transaction"])
    boundary = lambda: journal.checkpoint(context, "put back")  # noqa: E731 - as short as it is plain
    with writer.Writer(directory, entry["transaction"], entry["folders"], boundary) as files:
        files.put_back(
            [
                (path, _reader(context, wanted[path]), _mode(wanted, found, path))
                for path in differing
                if path in wanted
            ],
            [path for path in differing if path not in wanted],
        )
    if recorded is not None:
        writer.put_particulars_back(directory, recorded)
    writer.sweep(directory, entry["folders"], entry["transaction"])
    fresh, index = tree.scan(directory, index)
    wrong = tree.differences(wanted, fresh)
    if wrong:
        raise Failure(
            "another process writes to it: %s" % ", ".join(wrong[:5]), kind="changed-meanwhile", hint="end it"
        )
    site.save_index(context, directory, index)
    return kept


def _reader(context, item):
    return lambda: objects.read(context.state, item.sha)


def _mode(wanted, found, path):
    return wanted[path].mode if path not in found else None


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
        sync_file(target)
        kept = folder
    return kept


def _sweep_state(state):
    """Temporary files of an agent that was killed while it wrote its state."""
    for folder in ("", "releases", "bases"):
        try:
            names = os.listdir(state.path(folder))
        except OSError:
            continue  # no release yet
        for name in names:
            if name.startswith(tree.TEMPORARY_PREFIX):
                os.unlink(state.path(folder, name))
