"""push and rollback: one transaction each, towards a newer or an older release."""

import contextlib
import os
import shutil
import tempfile
import time

from . import attempts, audit, layers, lock, objects, releases, tree
from . import site as sites
from .failure import EXIT_USAGE, Failure
from .state import State, disk_failure
from .transaction import Transaction, result_of

_OUTCOME_S = 60.0


def push(context):
    """Move the host to base + stack with a patch replacing its series' earlier version."""
    context.steps = {}
    patch = context.args["patch"]
    content = context.wire.blobs["patch"]
    if objects.digest(content) != patch["sha256"]:
        raise Failure("the patch did not arrive whole", kind="link-lost")
    with _held(context), _ordinary_umask():
        return _audited(context, lambda: _push(context, patch, content))


def rollback(context):
    """Back to an older release."""
    context.steps = {}
    with _held(context), _ordinary_umask():
        return _audited(context, lambda: _rollback(context))


def outcome(context):
    """What became of a transaction: asked after a lost link. Waits for it to end where it still runs, and recovers.

    Returns:
        status `ok`, outcome `committed` (with the release, and the one before), `not-committed`, or `in-progress`
        after `timeout_s` (default 60) seconds of waiting.
    """
    wanted = context.args["transaction"]
    end = time.monotonic() + context.args.get("timeout_s", _OUTCOME_S)
    while True:
        holder = lock.current_holder(context.state)
        running = holder is not None and holder.get("transaction") == wanted
        if not running or time.monotonic() > end or context.wire.cancelled.is_set():
            break
        time.sleep(0.05)
    if not running:
        lock.reading(context)
    now = releases.pointer(context.state)
    previous = None
    for transaction, number in now["recent"]:
        if transaction == wanted:
            return {"status": "ok", "outcome": "committed", "release": number, "previous": previous}
        previous = number
    return {"status": "ok", "outcome": "in-progress" if running else "not-committed", "release": now["release"]}


def history(context):
    """Releases and attempts, newest last."""
    busy = lock.reading(context)
    now = releases.current(context.state)
    entries = []
    if now is not None:
        for release in [releases.load(context.state, 0, now["base"])] + releases.listing(context.state):
            entries.append(
                {
                    "release": release["number"],
                    "parent": release["parent"],
                    "patches": releases.references(release),
                    "version": release["version"],
                    "files": len(release["files"]),
                    "at": release["at"],
                    "by": release["by"],
                    "command": release["command"],
                    "current": release["number"] == now["number"],
                    "other_base": release["base"] != now["base"],
                }
            )
    return {
        "status": "ok",
        "release": now["number"] if now else None,
        "releases": entries,
        "attempts": [attempts.summary(context, attempt) for attempt in attempts.told(context)],
        "push_in_progress": busy,
    }


@contextlib.contextmanager
def _held(context):
    """The lock; a dry run on a host that deployctl has never changed works in a temporary state directory."""
    if context.args.get("dry_run") and context.state.read_json("current.json") is None:
        folder = tempfile.mkdtemp(prefix="deployctl-dry-run-")
        context.state = State(folder)
        try:
            yield
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    with lock.exclusive(context):
        yield


@contextlib.contextmanager
def _ordinary_umask():
    """New files of a package are for the server to read, whoever it runs as, and however strict root's umask is."""
    before = os.umask(0o022)
    try:
        yield
    finally:
        os.umask(before)


def _audited(context, act):
    try:
        try:
            result = act()
        except OSError as error:
            raise disk_failure(error, error.filename or context.state.root) from error
    except Failure as failure:
        if not context.args.get("dry_run"):
            audit.record(context, failure.as_result())
        raise
    if not context.args.get("dry_run"):
        audit.record(context, result)
    return result


def _push(context, patch, content):
    started = layers.begin_step(context, "preflight")
    from . import package

    layers.check_fit(patch, package.locate(context))
    site = sites.open_site(context, context.args.get("adopt", False))
    _check_writable(site)
    layers.end_step(context, "preflight", started)
    kept, todo = releases.new_stack(site.release, patch)
    if _is_same(context, site, patch):
        site.save_index()
        return result_of(context, site, "unchanged", site.release, {}, [])
    number = max([0] + releases.numbers(context.state)) + 1
    transaction = Transaction(context, site, number)
    transaction.set_drift_aside()
    base = releases.expected(context.state, releases.load(context.state, 0, site.release["base"]))
    with transaction.undone_on_failure():
        builder = transaction.builder
        builder.start_from(base, kept)
        for layer in todo:
            source = content if layer is patch else builder.content(layer["sha256"])
            builder.apply(_request_of(layer), source)
        release = _release(context, site, transaction.id, number, base, builder)
        if context.args.get("dry_run"):
            return transaction.planned(release)
        return transaction.carry_out(release, "pushed")


def _release(context, site, transaction, number, base, builder):
    """The release that the built tree would be; `base` as {path: Entry}."""
    files = {}
    for path in tree.differences(base, builder.entries):
        entry = builder.entries.get(path)
        files[path] = {"sha": entry.sha if entry else None, "mode": (entry or base[path]).mode}
    return {
        "number": number,
        "parent": site.release["number"],
        "base": site.release["base"],
        "package": site.package.name,
        "package_dir": site.package.directory,
        "version": site.package.version,
        "python": context.python,
        "at": time.time(),
        "by": context.operator,
        "command": context.command,
        "transaction": transaction,
        "patches": builder.layers,
        "files": files,
    }


def _request_of(layer):
    keys = ("ref", "series", "version", "kind", "filename", "sha256", "metadata")
    return {key: layer[key] for key in keys}


def _is_same(context, site, patch):
    """Whether this very patch already stands in the stack of an unedited tree."""
    if site.drifted:
        return False
    return any(
        layer["ref"] == patch["ref"] and layer["sha256"] == patch["sha256"] and layer["metadata"] == patch["metadata"]
        for layer in site.release["patches"]
    )


def _rollback(context):
    started = layers.begin_step(context, "preflight")
    if releases.current(context.state) is None:
        if context.args.get("to") in ("base", 0):
            return {"status": "unchanged", "release": 0, "previous": 0, "patches": [], "files": [], "verified": []}
        raise Failure(
            "nothing was ever pushed to this host",
            kind="nothing-to-roll-back",
            hint="deployctl status",
            exit_code=EXIT_USAGE,
        )
    target_word = context.args.get("to")
    target = releases.find(context.state, target_word, releases.current(context.state))
    site = sites.open_site(context)
    if site.release["base"] != target["base"]:
        try:
            target = releases.find(context.state, target_word, site.release)
        except Failure as failure:
            failure.fields["warnings"] = list(site.package.warnings)  # what it was installed anew with
            raise
    _check_writable(site)
    layers.end_step(context, "preflight", started)
    if target["number"] == site.release["number"] and not site.drifted:
        site.save_index()
        return result_of(context, site, "unchanged", site.release, {}, [])
    transaction = Transaction(context, site, None)
    transaction.set_drift_aside()
    with transaction.undone_on_failure():
        builder = transaction.builder
        builder.entries = releases.expected(context.state, target)
        builder.layers = target["patches"]
        if context.args.get("dry_run"):
            return transaction.planned(target)
        return transaction.carry_out(target, "rolled_back")


def _check_writable(site):
    directory = site.package.directory
    if not os.access(directory, os.W_OK):
        read_only = bool(os.statvfs(directory).f_flag & os.ST_RDONLY)
        if read_only:
            raise Failure("read-only file system: %s" % directory, kind="read-only", hint="remount it writable")
        raise Failure(
            "%s may not write to %s" % (_user(), directory),
            kind="permission",
            hint="set `user:` of this host to the owner of the package, or change the folder's owner",
        )


def _user():
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "uid %d" % os.geteuid()
