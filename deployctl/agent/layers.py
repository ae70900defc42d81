"""Applying patches: what each one makes of the tree below it. Only a live script touches the live tree here."""

import os
import time

from . import journal, objects, places, releases, script, staging, tree, unified, writer
from .failure import EXIT_USAGE, Cancelled, Failure


class Builder:
    """The tree as it grows, layer by layer.

    Attributes:
        entries: {path: Entry} after the layers applied so far.
        layers: The applied layers, as a release records them.
        touched: Whether the live tree may have been changed.
        scripting: Whether a script has been let loose on the live tree and what it did is not stored yet.
        output: The end of what the last script printed.
        not_run: Live scripts that a dry run left out: they would change the live tree.
    """

    def __init__(self, context, site, transaction, begin):
        self._context = context
        self._site = site
        self._transaction = transaction
        self._begin = begin
        self._contents = {}
        self._staging = staging.Staging(context.state, site.package.name)
        self.entries = {}
        self.layers = []
        self.touched = False
        self.scripting = False
        self.output = ""
        self.not_run = []

    def start_from(self, base_entries, layers):
        """Begin at the base with some layers as they were recorded."""
        self.entries = dict(base_entries)
        self.layers = list(layers)
        for layer in layers:
            releases.overlay(self.entries, layer["result"])

    def content(self, sha):
        """The bytes of a hash: made by this transaction, or stored."""
        if sha in self._contents:
            return self._contents[sha]
        return objects.read(self._context.state, sha)

    def close(self):
        """Keep the staged copy for the next push; nothing else of it is needed any more."""
        self._staging.keep()

    def store(self):
        """Make everything that the layers made durable."""
        for content in self._contents.values():
            objects.put(self._context.state, content)

    def apply(self, patch, content):
        """Apply one patch on top.

        Raises:
            Failure: It does not fit, fails, hangs, or changes what it did not declare.
        """
        live = patch["kind"] == "script" and patch["metadata"]["targets"] is None
        before = dict(self.entries)
        if live and self._context.args.get("dry_run"):
            self.not_run.append(patch["ref"])
            return
        if patch["kind"] == "diff":
            self._diff(patch, content)
        elif live:
            self._live(patch, content)
        else:
            self._staged(patch, content)
        changed = tree.differences(before, self.entries)
        self._contents[objects.digest(content)] = content
        self.layers.append(
            dict(
                patch,
                live=live,
                files={path: {"before": _sha(before, path), "after": _sha(self.entries, path)} for path in changed},
                result={
                    path: {"sha": _sha(self.entries, path), "mode": _mode(self.entries, before, path)}
                    for path in changed
                },
            )
        )

    # -- diffs -------------------------------------------------------------------------------------------------------

    def _diff(self, patch, content):
        started = begin_step(self._context, "stage")
        allowed = patch["metadata"]["targets"]
        files = unified.parse(content)
        paths = unified.target_paths(files, self._site.package.name, self.entries.__contains__)
        for file_patch, path in zip(files, paths):
            if allowed is not None and not _declared(path, allowed):
                raise _undeclared(patch, [path])
            old = self.content(self.entries[path].sha) if path in self.entries else None
            new = unified.apply(old, file_patch, path)
            if new is None:
                del self.entries[path]
                continue
            mode = self.entries[path].mode if path in self.entries else file_patch.mode or 0o644
            self.entries[path] = tree.Entry(self._keep(new), mode)
        end_step(self._context, "stage", started)

    def _keep(self, content):
        sha = objects.digest(content)
        self._contents[sha] = content
        return sha

    # -- staged scripts ----------------------------------------------------------------------------------------------

    def _staged(self, patch, content):
        context, site = self._context, self._site
        started = begin_step(context, "stage")
        root = context.state.path("staging", self._transaction, str(len(self.layers)))
        self._staging.make(root, site.package.directory, self.entries, site.entries, self.content)
        staged = self._staging.path
        end_step(context, "stage", started)
        self._begin()
        try:
            self._run(patch, content, root, staged)
        except BaseException:
            self._staging.drop()
            before, self.touched = self.touched, True  # until the live tree has been seen to be as it was
            self.touched = bool(site.differences_since()) or before
            raise
        found = self._staging.read()
        # Copied files are writable for the script; what counts as a change of mode is what the script itself did.
        changed = tree.differences(self.entries, found)
        outside = [path for path in changed if not _declared(path, patch["metadata"]["targets"])]
        if outside:
            raise _undeclared(patch, outside)
        before, self.touched = self.touched, True  # until the live tree has been seen to be as it was
        reached = self._site.differences_since()
        if reached:
            raise Failure(
                "while %s ran, it or somebody else changed the live tree: %s" % (patch["ref"], ", ".join(reached[:10])),
                kind="undeclared",
                hint="if the script did: let it work on its first argument (the staged folder), or remove `targets` to"
                " run it live; if somebody else did: let them finish, then push again",
            )
        self.touched = before
        for path in changed:
            if path not in found:
                del self.entries[path]
                continue
            with open(os.path.join(staged, path), "rb") as source:
                sha = self._keep(source.read())
            mode = self.entries[path].mode if path in self.entries else found[path].mode & 0o777
            self.entries[path] = tree.Entry(sha, mode)

    # -- live scripts ------------------------------------------------------------------------------------------------

    def _live(self, patch, content):
        context, site, directory = self._context, self._site, self._site.package.directory
        root = context.state.path("staging", self._transaction, str(len(self.layers)))
        os.makedirs(root, mode=0o700)
        entry = self._begin()
        self.store()
        if entry["particulars"] is None:  # else they are those of before the live script below this one
            journal.note_particulars(context, entry, writer.particulars(directory), tree.strange(directory))
        differing = tree.differences(self.entries, site.entries)
        places.check_places(site, self.entries, differing)
        journal.require_own(context.state, entry)
        self.touched = True
        materialise(context, site, self._transaction, self.entries, differing)
        if writer.own_copies(directory, self._transaction):
            objects.sync_file_system(directory)
        before = site.rescan()
        folders, strange = site.index["folders"], tree.strange(directory)
        recorded = writer.particulars(directory)
        journal.checkpoint(context, "before live script")
        old_times = {path: known[1] / 1e9 for path, known in site.index["files"].items()}
        self.scripting = True
        self._run(patch, content, root, directory)
        journal.checkpoint(context, "after live script")
        places.refuse_strange(patch, directory, before, folders, strange)
        found = site.rescan()
        changed = tree.differences(self.entries, found)
        for path in changed:
            full = os.path.join(directory, path)
            writer.drop_bytecode(full)
            if path not in found:
                del self.entries[path]
                continue
            with open(full, "rb") as source:
                sha = self._keep(source.read())
            mode = self.entries[path].mode if path in self.entries else found[path].mode
            self.entries[path] = tree.Entry(sha, mode)
        self.store()
        self.scripting = False
        # As with staged scripts: targets keep links, mode and owner, whatever way the script wrote them.
        writer.put_links_back(directory, {path: about[3] for path, about in recorded.items()}, missing_too=False)
        relinked = tree.differences(self.entries, site.rescan())
        materialise(context, site, self._transaction, self.entries, relinked)
        writer.put_particulars_back(directory, recorded)
        for path in changed:
            if path in self.entries and path not in relinked:
                full = os.path.join(directory, path)
                writer.set_new_second(full, old_times.get(path))
                writer.sync_file(full)
        journal.checkpoint(context, "live script recorded")
        site.rescan()

    def _run(self, patch, content, root, directory):
        context = self._context
        started = begin_step(context, "run", patch=patch["ref"])
        path = os.path.join(root, "script", patch["filename"])
        os.makedirs(os.path.dirname(path))
        with open(path, "wb") as out:
            out.write(content)
        environment = dict(os.environ, DEPLOYCTL_PACKAGE_DIR=directory, DEPLOYCTL_PATCH=patch["ref"])
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        environment[journal.SCRIPT_MARKER] = journal.script_mark(context.state, self._transaction)
        status, self.output = script.run(
            context,
            [context.python, path, directory],
            directory,
            environment,
            patch["metadata"]["timeout_s"],
            patch["ref"],
        )
        if status != 0:
            raise Failure(
                "%s failed: %s\n%s" % (patch["ref"], script.describe(status), _last_lines(self.output)),
                kind="script-failed",
                hint="mend the script and push again; the package is as before",
                output=self.output,
            )
        journal.end_scripts(context, self._begin())
        end_step(context, "run", started, patch=patch["ref"])


def materialise(context, site, transaction, wanted, paths):
    """Make the files of `paths` in the live tree as `wanted` ({path: Entry}) says; the journal is open.

    Folders of the pristine package stay even when they become empty.
    """
    kept = releases.base_of(context.state, site.release["base"])["folders"]
    boundary = lambda: journal.checkpoint(context, "replace")  # noqa: E731 - as short as it is plain
    with writer.Writer(site.package.directory, transaction, kept, boundary) as files:
        for path in paths:
            if path not in wanted:
                files.remove(path)
                continue
            mode = wanted[path].mode if path not in site.entries else None
            files.prepare(path, objects.read(context.state, wanted[path].sha), mode)
        files.swap()


def check_fit(patch, found):
    """Refuse a patch for another package or version.

    Raises:
        Failure: exit 2.
    """
    from . import versions

    wanted = patch["metadata"].get("package")
    if wanted and wanted != found.name:
        raise Failure(
            "%s is for the package %s, this host serves %s" % (patch["ref"], wanted, found.name),
            kind="other-package",
            hint="set `package:` of the host, or push another patch",
            exit_code=EXIT_USAGE,
        )
    specifiers = patch["metadata"].get("versions") or ""
    if specifiers and not versions.satisfies(found.version, specifiers):
        raise Failure(
            "%s does not fit %s %s (it is for %s)" % (patch["ref"], found.name, found.version, specifiers),
            kind="version",
            hint="install a version it fits, or push a patch for %s" % found.version,
            exit_code=EXIT_USAGE,
        )


def _declared(path, targets):
    return any(path == target or (target.endswith("/") and path.startswith(target)) for target in targets)


def _undeclared(patch, paths):
    return Failure(
        "%s changes files outside its targets: %s" % (patch["ref"], ", ".join(paths[:10])),
        kind="undeclared",
        hint="add them to `targets` in its metadata, or change the patch; nothing has changed",
    )


def _last_lines(text, most=12):
    return "\n".join("  | " + line for line in text.rstrip().splitlines()[-most:])


def _sha(entries, path):
    return entries[path].sha if path in entries else None


def _mode(entries, before, path):
    return (entries.get(path) or before[path]).mode


def begin_step(context, name, **fields):
    """Announce a step; returns when it began, for `end_step`. Raises Cancelled when the client has gone."""
    if context.wire.cancelled.is_set():
        raise Cancelled
    context.wire.event("step", name=name, state="start", **fields)
    return time.monotonic()


def end_step(context, name, started, **fields):
    """Announce a step's end and how long it took."""
    seconds = time.monotonic() - started
    context.steps[name] = round(context.steps.get(name, 0) + seconds, 4)
    context.wire.event("step", name=name, state="done", seconds=round(seconds, 4), **fields)
