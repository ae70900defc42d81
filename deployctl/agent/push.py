"""push and rollback: one transaction each, towards a newer or an older release."""

import contextlib
import os
import shutil
import tempfile
import time

from . import attempts, audit, journal, layers, lock, objects, recover, releases, tree, verify
from . import site as sites
from .failure import Cancelled, Failure
from .state import State

_HOLD_S = 300.0
_SPARE_BYTES = 64 * 1024


def push(context):
    """Move the host to base + stack with a patch replacing its series' earlier version."""
    context.steps = {}
    patch = context.args["patch"]
    content = context.wire.blobs["patch"]
    if objects.digest(content) != patch["sha256"]:
        raise Failure("the patch did not arrive whole", kind="link-lost")
    with _held(context):
        return _audited(context, lambda: _push(context, patch, content))


def rollback(context):
    """Back to an older release."""
    context.steps = {}
    with lock.exclusive(context):
        return _audited(context, lambda: _rollback(context))


def outcome(context):
    """What became of a transaction: asked after a lost link. Recovers first.

    Returns:
        status `ok`, outcome `committed` (with the release), `not-committed`, or `in-progress`.
    """
    busy = lock.reading(context)
    wanted = context.args["transaction"]
    pointer = context.state.read_json("current.json") or {}
    if pointer.get("transaction") == wanted:
        return {"status": "ok", "outcome": "committed", "release": pointer["release"]}
    made = [entry for entry in releases.listing(context.state) if entry["transaction"] == wanted]
    if made:
        return {"status": "ok", "outcome": "committed", "release": made[-1]["number"]}
    return {"status": "ok", "outcome": "in-progress" if busy else "not-committed", "release": pointer.get("release")}


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
        "attempts": [attempts.summary(context, attempt) for attempt in attempts.listing(context.state)],
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


def _audited(context, act):
    try:
        result = act()
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
        return _result(context, site, "unchanged", site.release, {}, [])
    transaction = _Transaction(context, site)
    transaction.set_drift_aside()
    about = releases.base_of(context.state, site.release["base"])
    base = {path: tree.Entry(*pair) for path, pair in about["files"].items()}
    with transaction.undone_on_failure():
        builder = transaction.builder
        builder.start_from(base, kept)
        for layer in todo:
            source = content if layer is patch else builder.content(layer["sha256"])
            builder.apply(_request_of(layer), source)
        release = transaction.release_from(builder)
        if context.args.get("dry_run"):
            return transaction.planned(builder, release)
        return transaction.carry_out(builder, release, "pushed")


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
            "nothing was ever pushed to this host", kind="nothing-to-roll-back", hint="deployctl status", exit_code=2
        )
    target_word = context.args.get("to")
    target = releases.find(context.state, target_word, releases.current(context.state))
    site = sites.open_site(context)
    if site.release["base"] != target["base"]:
        target = releases.find(context.state, target_word, site.release)
    _check_writable(site)
    layers.end_step(context, "preflight", started)
    if target["number"] == site.release["number"] and not site.drifted:
        site.save_index()
        return _result(context, site, "unchanged", site.release, {}, [])
    transaction = _Transaction(context, site)
    transaction.set_drift_aside()
    with transaction.undone_on_failure():
        builder = transaction.builder
        builder.entries = releases.expected(context.state, target)
        builder.layers = target["patches"]
        if context.args.get("dry_run"):
            return transaction.planned(builder, target)
        return transaction.carry_out(builder, target, "rolled_back")


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


class _Transaction:
    """From the first change of the live tree to the commit, or back."""

    def __init__(self, context, site):
        self._context = context
        self._site = site
        self._id = context.args.get("transaction") or "%d-%d" % (time.time_ns(), os.getpid())
        self._open = False
        self._committed = False
        self._warnings = []
        self._displaced = None
        self._swapped = False
        self.builder = layers.Builder(context, site, self._id, self.begin)

    def begin(self):
        """Open the journal once; a dry run changes nothing and needs none, but its script might: it is checked."""
        if not self._open:
            self._open = True
            journal.begin(self._context, self._id, self._site.package.directory, self._site.release)

    def set_drift_aside(self):
        """Hand-made edits stop the transaction, unless forced: then they are copied away first."""
        if not self._site.drifted:
            return
        if not self._context.args.get("force"):
            raise sites.drift_failure(self._context, self._site)
        present = [path for path in self._site.drifted if path in self._site.entries]
        if self._context.args.get("dry_run"):
            self._warnings.append("hand-made edits would be set aside: %s" % ", ".join(self._site.drifted))
            return
        folder = recover.displace(self._context, self._site.package.directory, present, self._site.entries, self._id)
        self._displaced = folder
        if folder:
            self._warnings.append("hand-made edits were copied to %s before going on" % folder)

    @contextlib.contextmanager
    def undone_on_failure(self):
        """Run the body; when it fails or is cancelled before the commit, put the tree back."""
        try:
            yield
        except BaseException as error:
            if self._committed:
                raise
            touched = self._swapped or self.builder.touched
            self._undo()
            if isinstance(error, Failure):
                error.status = "restored" if touched else "failed"
                error.fields.setdefault("transaction", self._id)
                error.fields.setdefault("release", self._site.release["number"])
                error.fields.setdefault("patches", releases.references(self._site.release))
                error.fields.setdefault("steps", self._context.steps)
            raise
        finally:
            if not self._open:
                journal.clear_staging(self._context)

    def _undo(self):
        if not self._open:
            return
        started = time.monotonic()
        self._context.wire.event("step", name="restore", state="start")
        recover.recover(self._context, announce=False)
        layers.end_step(self._context, "restore", started)

    def release_from(self, builder):
        """The release that the built tree would be."""
        site = self._site
        about = releases.base_of(self._context.state, site.release["base"])
        base = {path: tree.Entry(*pair) for path, pair in about["files"].items()}
        files = {}
        for path in tree.differences(base, builder.entries):
            entry = builder.entries.get(path)
            files[path] = {"sha": entry.sha if entry else None, "mode": (entry or base[path]).mode}
        numbers = releases.numbers(self._context.state)
        return {
            "number": (numbers[-1] if numbers else 0) + 1,
            "parent": site.release["number"],
            "base": site.release["base"],
            "package": site.package.name,
            "package_dir": site.package.directory,
            "version": site.package.version,
            "python": self._context.python,
            "at": time.time(),
            "by": self._context.operator,
            "command": self._context.command,
            "transaction": self._id,
            "patches": builder.layers,
            "files": files,
        }

    def _compile(self, builder, changed):
        started = layers.begin_step(self._context, "compile")
        verify.compile_files(
            [
                (path, builder.content(builder.entries[path].sha))
                for path in changed
                if path.endswith(".py") and path in builder.entries
            ]
        )
        layers.end_step(self._context, "compile", started)

    def planned(self, builder, release):
        """The result of a dry run: the plan and its diff."""
        changed = tree.differences(self._site.expected, builder.entries)
        self._compile(builder, changed)
        if self._open:
            recover.recover(self._context, announce=False)
            self._open = False

        def text(entries, path):
            return builder.content(entries[path].sha) if path in entries else b""

        diff = sites.unified((path, text(self._site.expected, path), text(builder.entries, path)) for path in changed)
        result = _result(self._context, self._site, "planned", release, self._files(builder, changed), [])
        self._warnings.extend(
            "%s runs on the live tree: a dry run cannot show what it does" % ref for ref in builder.not_run
        )
        result.update(diff=diff, release=self._site.release["number"], warnings=self._warnings, output=builder.output)
        return result

    def carry_out(self, builder, release, status):
        """Compile, swap, import, and commit."""
        context, site = self._context, self._site
        changed = tree.differences(site.expected, builder.entries)
        self._compile(builder, changed)
        self.begin()
        builder.store()
        started = layers.begin_step(context, "swap")
        live = site.rescan()
        differing = tree.differences(builder.entries, live)
        self._check_space(builder, differing)
        self._swapped = True
        recover.materialise(context, site.package.directory, builder.entries, live, differing)
        journal.checkpoint(context, "swapped")
        site.rescan()
        wrong = tree.differences(builder.entries, site.entries)
        if wrong:
            raise Failure(
                "another process writes to the package while it is being patched: %s" % ", ".join(wrong[:5]),
                kind="changed-meanwhile",
                hint="end it, then try again",
            )
        layers.end_step(context, "swap", started)
        started = layers.begin_step(context, "import")
        verified = verify.import_modules(context, self._wanted(builder, changed), self._verify_timeout_s(builder))
        layers.end_step(context, "import", started)
        self._wait_for_others(release)
        started = layers.begin_step(context, "commit")
        if status == "pushed":
            journal.checkpoint(context, "before release")
            context.state.write_json(release, "releases", "%d.json" % release["number"])
        journal.point_to(context, release, self._id)
        self._committed = True
        try:
            site.save_index()
            journal.clear_staging(context)
            journal.end(context)
        except (Failure, OSError) as error:
            # The deed is done; the next command tidies up.
            self._warnings.append("tidying after the commit failed: %s" % error)
        layers.end_step(context, "commit", started)
        result = _result(context, site, status, release, self._files(builder, changed), verified)
        result.update(warnings=self._warnings, output=builder.output, displaced=self._displaced)
        result["previous"] = site.release["number"]
        return result

    def _wait_for_others(self, release):
        """With several hosts: everybody is ready before anybody commits."""
        context = self._context
        if context.wire.cancelled.is_set():
            raise Cancelled
        if not context.args.get("hold"):
            return
        context.wire.event("prepared", release=release["number"])
        answer = context.wire.await_control(("commit", "abort"), context.limit("hold_s", _HOLD_S))
        if answer is None and context.wire.cancelled.is_set():
            raise Cancelled("the client went away before the commit")
        if answer is None or answer["control"] == "abort":
            raise Failure(
                (answer or {}).get("reason") or "another host was not ready in time",
                kind="aborted",
                hint="mend the host that failed, or push with --independent",
            )

    def _check_space(self, builder, paths):
        directory = self._site.package.directory
        needed = sum(len(builder.content(builder.entries[path].sha)) for path in paths if path in builder.entries)
        usage = os.statvfs(directory)
        free = usage.f_bavail * usage.f_frsize
        if needed and free < needed + min(_SPARE_BYTES, needed):
            raise Failure(
                "no space left on %s: %d bytes needed, %d free" % (directory, needed, free),
                kind="disk-full",
                hint="free some space there (df -h %s)" % directory,
            )

    def _wanted(self, builder, changed):
        """[(module, real path, sha)] to import: what the patches name, else the modules of the changed files."""
        named = []
        declared = False
        for layer in list(builder.layers) + list(self._site.release["patches"]):
            listed = layer["metadata"].get("verify")
            if listed is not None and set(layer["files"]) & set(changed):
                declared = True
                named.extend(listed)
        if not declared:
            named = [verify.module_name(path, self._site.package.name) for path in changed if path in builder.entries]
        named.extend(self._context.args.get("imports") or [])
        wanted = []
        for module in dict.fromkeys(name for name in named if name):
            path = self._file_of(module, builder)
            if (
                path is None
                and module.split(".")[0] == self._site.package.name
                and module not in (self._context.args.get("imports") or [])
            ):
                continue  # a module that this release does not have (a rollback leaves it behind)
            real = os.path.realpath(os.path.join(self._site.package.directory, path)) if path else None
            wanted.append((module, real, builder.entries[path].sha if path else None))
        return wanted

    def _file_of(self, module, builder):
        name, _, rest = module.partition(".")
        if name != self._site.package.name:
            return None
        stem = rest.replace(".", "/")
        for path in [stem + ".py", stem + "/__init__.py"] if stem else ["__init__.py"]:
            if path in builder.entries:
                return path
        return None

    def _verify_timeout_s(self, builder):
        bounds = [layer["metadata"]["verify_timeout_s"] for layer in builder.layers]
        return max(bounds + [180.0])

    def _files(self, builder, changed):
        return {path: (self._site.expected.get(path), builder.entries.get(path)) for path in changed}


def _result(context, site, status, release, files, verified):
    known_bad = [
        "%s is known to be bad: %s" % (layer["ref"], layer["metadata"]["known_bad"])
        for layer in release["patches"]
        if layer["metadata"].get("known_bad")
    ]
    return {
        "status": status,
        "release": release["number"],
        "previous": site.release["number"],
        "patches": releases.references(release),
        "package": site.package.name,
        "package_dir": site.package.directory,
        "version": site.package.version,
        "files": [
            {"path": path, "before": before.sha if before else None, "after": after.sha if after else None}
            for path, (before, after) in sorted(files.items())
        ],
        "verified": verified,
        "known_bad": known_bad,
        "warnings": list(site.package.warnings),
        "steps": context.steps,
        "transaction": context.args.get("transaction"),
    }
