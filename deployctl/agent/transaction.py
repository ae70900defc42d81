"""One transaction of the live tree: from the first change to the commit, or back."""

import contextlib
import os
import re
import time

from . import journal, layers, lock, objects, places, recover, releases, tree, verify
from . import site as sites
from .failure import EXIT_USAGE, Cancelled, Failure
from .state import disk_failure

_HOLD_S = 300.0
_VERIFY_S = 180.0
_SPARE_BYTES = 64 * 1024
_BLOCK = 4096


class Transaction:
    """A move of the live tree to what `builder` builds.

    Args:
        context: Of the operation.
        site: The package as found; its lock is held.
        makes: The number of the release that a commit makes, None for a move to an older one.

    Attributes:
        builder: Grows the tree to move to.
        id: The transaction's id, the client's where it gave one.
    """

    def __init__(self, context, site, makes):
        self._context = context
        self._site = site
        self._makes = makes
        self._entry = None
        self._committed = False
        self._swapped = False
        self._warnings = []
        self._displaced = None
        self.id = context.args.get("transaction") or "%d-%d" % (time.time_ns(), os.getpid())
        if not re.match(r"\w[\w.-]*$", self.id):  # it names folders and files
            raise Failure("%r is no transaction id" % self.id, kind="usage", exit_code=EXIT_USAGE)
        self.builder = layers.Builder(context, site, self.id, self.begin)

    def begin(self):
        """Open the journal, once; returns its entry."""
        if self._entry is None:
            lock.require(self._context)
            self._entry = journal.begin(self._context, self.id, self._site, self._makes)
        return self._entry

    def set_drift_aside(self):
        """Hand-made edits stop the transaction, unless forced: then they are copied away first."""
        site, context = self._site, self._context
        if not site.drifted:
            return
        if not context.args.get("force"):
            raise sites.drift_failure(context, site)
        twin = sites.release_of_content(context, site)
        if twin is not None:
            self._warnings.append("the package was at release %d again, put back from outside" % twin)
            return
        if context.args.get("dry_run"):
            self._warnings.append("hand-made edits would be set aside: %s" % ", ".join(site.drifted))
            return
        present = [path for path in site.drifted if path in site.entries]
        self._displaced = recover.displace(context, site.package.directory, present, site.entries, self.id)
        if self._displaced:
            self._warnings.append("hand-made edits were copied to %s before going on" % self._displaced)

    @contextlib.contextmanager
    def undone_on_failure(self):
        """Run the body; when it fails or is cancelled before the commit, put the tree back."""
        try:
            yield
        except BaseException as error:
            if self._committed:
                raise
            failure = disk_failure(error, error.filename or "the package") if isinstance(error, OSError) else error
            touched = self._swapped or self.builder.touched
            self._undo(touched, failure)
            if isinstance(failure, Failure):
                failure.status = "restored" if touched else "failed"
                fields = {
                    "transaction": self.id,
                    "release": self._site.release["number"],
                    "patches": releases.references(self._site.release),
                    "steps": self._context.steps,
                    "displaced": self._displaced,
                    "warnings": [*self._site.package.warnings, *self._warnings],
                }
                failure.fields = dict(fields, **failure.fields)
            if failure is error:
                raise
            raise failure from error
        finally:
            if self._entry is None:
                journal.clear_staging(self._context)

    def _undo(self, touched, failure):
        if self._entry is None:
            return
        started = time.monotonic()
        self._context.wire.event("step", name="restore", state="start")
        self.builder.close()
        try:
            journal.require_own(self._context.state, self._entry, undoing=True)
            kept = recover.undo(self._context, self._entry, touched, displacing=not self.builder.scripting)
        except Failure as trouble:
            trouble.message = "%s\nbegun because: %s" % (trouble.message, getattr(failure, "message", failure))
            raise
        if kept:
            self._displaced = kept
            said = "contents that no release knows were found in the package, and copied to %s" % kept
            self._warnings.append(said)
            if isinstance(failure, Failure):
                failure.message += "\n%s before it was put back" % said
        layers.end_step(self._context, "restore", started)

    def planned(self, release):
        """The result of a dry run: the plan and its diff. The live tree is as it was."""
        site, builder = self._site, self.builder
        changed = tree.differences(site.expected, builder.entries)
        self._compile(changed)
        builder.close()
        if self._entry is not None:
            recover.undo(self._context, self._entry, touched=False, displacing=False)

        def text(entries, path):
            return builder.content(entries[path].sha) if path in entries else None

        diff = sites.unified((path, text(site.expected, path), text(builder.entries, path)) for path in changed)
        self._warnings.extend(
            "%s runs on the live tree: a dry run cannot show what it does" % ref for ref in builder.not_run
        )
        result = self._result("planned", release, changed, [])
        result.update(diff=diff, release=site.release["number"])
        return result

    def carry_out(self, release, status):
        """Compile, swap, import, and commit.

        Args:
            release: The release that the tree becomes.
            status: The result's, `pushed` or `rolled_back`.
        """
        context, site, builder = self._context, self._site, self.builder
        changed = tree.differences(site.expected, builder.entries)
        self._compile(changed)
        started = layers.begin_step(context, "swap")
        differing = tree.differences(builder.entries, site.entries)
        places.check_places(site, builder.entries, differing)
        self._check_space(differing)
        self.begin()
        builder.store()
        self._refuse_edits_since(site.edited_since(differing))
        journal.require_own(context.state, self._entry)
        self._swapped = True
        layers.materialise(context, site, self.id, builder.entries, differing)
        journal.checkpoint(context, "swapped")
        site.rescan()
        self._refuse_edits_since(tree.differences(builder.entries, site.entries))
        layers.end_step(context, "swap", started)
        started = layers.begin_step(context, "import")
        wanted = self._modules(release, sorted(set(changed) | set(site.drifted)))
        verified = verify.import_modules(context, wanted, self._verify_timeout_s())
        layers.end_step(context, "import", started)
        self._wait_for_others(release)
        started = layers.begin_step(context, "commit")
        journal.require_own(context.state, self._entry)
        if self._makes is not None:
            journal.checkpoint(context, "before release")
            context.state.write_json(release, "releases", "%d.json" % release["number"])
        journal.commit(context, release, self.id)
        self._committed = True
        try:
            site.save_index()
            builder.close()
            recover.close(context, self._entry)
        except (Failure, OSError) as error:
            # The deed is done; the next command tidies up.
            self._warnings.append("tidying after the commit failed: %s" % error)
        layers.end_step(context, "commit", started)
        return self._result(status, release, changed, verified)

    def _compile(self, changed):
        started = layers.begin_step(self._context, "compile")
        builder = self.builder
        verify.compile_files(
            [
                (path, builder.content(builder.entries[path].sha))
                for path in changed
                if path.endswith(".py") and path in builder.entries
            ]
        )
        layers.end_step(self._context, "compile", started)

    def _refuse_edits_since(self, paths):
        if paths:
            raise Failure(
                "somebody else writes to the package while it is being patched: %s" % ", ".join(paths[:5]),
                kind="changed-meanwhile",
                hint="let them finish (or end that process), then try again",
            )

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

    def _check_space(self, paths):
        """Both disks, before anything is written: the new files lie beside the old ones until they are renamed."""
        builder, state, directory = self.builder, self._context.state, self._site.package.directory
        needed: dict = {}
        for path in paths:
            if path in builder.entries:
                sha = builder.entries[path].sha
                size = -(-len(builder.content(sha)) // _BLOCK) * _BLOCK
                _add(needed, directory, size)
                if not os.path.exists(objects.path_of(state, sha)):
                    _add(needed, state.root, size)
        for bytes_needed, place in needed.values():
            usage = os.statvfs(place)
            free = usage.f_bavail * usage.f_frsize
            with_spare = bytes_needed + min(_SPARE_BYTES, bytes_needed)
            if free < with_spare:
                raise Failure(
                    "no space left on %s: %d KiB are needed, %d KiB are free"
                    % (place, with_spare // 1024, free // 1024),
                    kind="disk-full",
                    hint="free some space there (df -h %s)" % place,
                )

    def _modules(self, release, changed):
        """[(module, real path, sha)] to import: what the patches name, else the modules of the changed files."""
        site, entries = self._site, self.builder.entries
        named, spoken_for = [], set()
        for layer in release["patches"] + site.release["patches"]:
            listed = layer["metadata"].get("verify")
            is_new = layer not in site.release["patches"]
            if listed is not None and (is_new or set(layer["files"]) & set(changed)):
                named.extend(listed)
                spoken_for |= set(layer["files"])
        own = [path for path in changed if path not in spoken_for and verify.module_name(path, site.package.name)]
        named.extend(verify.module_name(path, site.package.name) for path in own if path in entries)
        if any(path not in entries for path in own):
            named.append(site.package.name)  # a module that is gone cannot be imported; the package must do without it
        asked = self._context.args.get("imports") or []
        wanted = []
        for module in dict.fromkeys([name for name in named if name] + asked):
            path = self._file_of(module)
            if path is None and module.split(".")[0] == site.package.name and module not in asked:
                continue  # a module that this release does not have: a rollback leaves it behind
            real = os.path.realpath(os.path.join(site.package.directory, path)) if path else None
            wanted.append((module, real, entries[path].sha if path else None))
        return wanted

    def _file_of(self, module):
        name, _, rest = module.partition(".")
        if name != self._site.package.name:
            return None
        stem = rest.replace(".", "/")
        for path in [stem + "/__init__.py", stem + ".py"] if stem else ["__init__.py"]:
            if path in self.builder.entries:
                return path
        return None

    def _verify_timeout_s(self):
        return max([_VERIFY_S] + [layer["metadata"]["verify_timeout_s"] for layer in self.builder.layers])

    def _result(self, status, release, changed, verified):
        before, after = self._site.expected, self.builder.entries
        files = {path: (before.get(path), after.get(path)) for path in changed}
        result = result_of(self._context, self._site, status, release, files, verified)
        result["warnings"] += self._warnings
        if self._makes is not None:
            result["warnings"] += [
                "%s changes no file: has what it looks for gone?" % layer["ref"]
                for layer in release["patches"]
                if layer not in self._site.release["patches"] and not layer["files"]
            ]
        result.update(transaction=self.id, output=self.builder.output, displaced=self._displaced)
        return result


def _add(needed, place, size):
    device = os.stat(place).st_dev
    total, _ = needed.get(device, (0, place))
    needed[device] = (total + size, place)


def result_of(context, site, status, release, files, verified):
    """The host's result of a push or rollback.

    Args:
        context: Of the operation.
        site: The package as it was found.
        status: The contract's.
        release: The release that the tree is at, or would be.
        files: {path: (Entry before or None, Entry after or None)}.
        verified: Names of the imported modules.
    """
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
        "output": "",
        "displaced": None,
    }
