"""The package on this host as deployctl knows it: where it is, its base, its current release, and what has drifted."""

import difflib
import os
import shutil
import time

from . import objects, package, releases, tree
from .failure import EXIT_DRIFT, EXIT_USAGE, Failure, counted

_DIFF_LINES = 200


class Site:
    """Package, current release and live hashes, read once per operation under the lock.

    Attributes:
        package: What package.locate found.
        release: The current release.
        entries: {path: Entry} of the live tree as it is.
        drifted: Paths whose live content differs from the current release.
    """

    def __init__(self, context, found, release, entries, index):
        self._context = context
        self.package = found
        self.release = release
        self.entries = entries
        self.index = index
        self.expected = releases.expected(context.state, release)
        self.drifted = tree.differences(self.expected, entries)

    def rescan(self):
        """Read the live tree again, through the stat cache."""
        self.entries, self.index = tree.scan(self.package.directory, self.index)
        return self.entries

    def save_index(self):
        """Keep the stat cache for the next command; a cache that cannot be written only costs time."""
        save_index(self._context, self.package.directory, self.index)

    def edited_since(self, paths):
        """Those of `paths` whose files have changed since the live tree was read last; a few stats, no walk."""
        return [path for path in paths if self._key(path) != (self.index["files"].get(path) or [None])[:4]]

    def _key(self, path):
        try:
            return tree.key_of(os.stat(os.path.join(self.package.directory, path)))
        except OSError:
            return [None]

    def differences_since(self):
        """Read the live tree again; the paths that have changed since it was read last."""
        before = self.entries
        return tree.differences(before, self.rescan())


def save_index(context, directory, index):
    """Write the stat cache, not synced: it is checked against the files whenever it is used."""
    import json

    path = context.state.path("index.json")
    try:
        with open(path + ".new", "w", encoding="ascii") as out:
            out.write(json.dumps(dict(index, directory=directory)))
        os.replace(path + ".new", path)
    except OSError as error:
        context.wire.event("warning", text="stat cache not written: %s" % error)


def load_index(context, directory):
    """The stat cache of `directory`, or None."""
    try:
        index = context.state.read_json("index.json")
    except Failure:
        return None  # a torn cache is no cache
    if not index or index.get("directory") != directory or not isinstance(index.get("files"), dict):
        return None
    return index


def open_site(context, adopt=False):
    """Find the package and its state; at first contact, or after a reinstall, snapshot the base.

    Args:
        context: Of the operation; its lock is held.
        adopt: Whether files that differ from how the package came become part of the base.

    Raises:
        Failure: Not found, another package in this state directory, or files that differ from the wheel's RECORD or
            git's HEAD (exit 9).
    """
    found = package.locate(context)
    release = releases.current(context.state)
    entries, index = tree.scan(found.directory, load_index(context, found.directory))
    if release is None:
        release = _snapshot(context, found, entries, index, adopt, None)
    else:
        about = releases.base_of(context.state, release["base"])
        if about["package_dir"] != found.directory:
            raise Failure(
                "the state in %s belongs to %s, but %s now finds %s"
                % (context.state.root, about["package_dir"], context.python, found.directory),
                kind="other-package",
                hint="set another state_dir for this host in hosts.yaml",
                exit_code=EXIT_USAGE,
            )
        site = Site(context, found, release, entries, index)
        if about["fingerprint"] == found.fingerprint:
            return site
        if not site.drifted or release_of_content(context, site) is not None:
            # The same content installed again, or committed in its work tree: the same base under a new name. Where
            # that took the patches away, the package is as if put back from outside, and its releases stay reachable.
            about.update(fingerprint=found.fingerprint, version=found.version)
            context.state.write_json(about, "bases", "%d.json" % release["base"])
            return site
        differing = _differing(found, entries)
        if differing and not adopt:
            raise drift_failure(
                context,
                site,
                "not as in the package as it was installed anew (%s to %s)" % (about["version"], found.version),
                differing,
                "reinstall it (git checkout in a work tree), or make these edits the new base: --adopt",
            )
        gone = ", ".join(releases.references(release))
        warning = (
            "the package was installed anew (%s to %s): this is the new base%s; earlier releases stay in the history"
        )
        warning %= (about["version"], found.version, gone and ", without %s from now on" % gone)
        found = found._replace(warnings=(*found.warnings, warning))
        release = _snapshot(context, found, entries, index, adopt, release)
    return Site(context, found, release, entries, index)


def _differing(found, entries):
    return package.differing_from_origin(found, {path: entry.sha for path, entry in entries.items()})


def _snapshot(context, found, entries, index, adopt, before):
    """Store every file of the pristine package and make it the base."""
    differing = _differing(found, entries)
    if differing and not adopt:
        origin = "its wheel's RECORD" if found.record is not None else "git's HEAD"
        raise Failure(
            "%s of %s not as in %s:\n%s"
            % (counted(len(differing), "file"), found.directory, origin, _listed(differing)),
            kind="drift",
            hint="reinstall the package, or make these edits part of the base: the same command with --adopt",
            exit_code=EXIT_DRIFT,
            status="drift",
            drift=[{"path": path, "expected": None, "found": _sha(entries, path)} for path in differing],
        )
    if before is None:
        _check_room(context, index)
    try:
        total = sum(_store(context, found.directory, path, entries[path].sha) for path in sorted(entries))
        objects.sync_file_system(context.state.root)
    except Failure:
        if before is None:
            # Nothing refers to them yet, and half a snapshot on a full disk helps nobody.
            shutil.rmtree(context.state.path("objects"), ignore_errors=True)
        raise
    number = before["base"] + 1 if before else 1
    about = {
        "package": found.name,
        "package_dir": found.directory,
        "version": found.version,
        "fingerprint": found.fingerprint,
        "python": context.python,
        "at": time.time(),
        "by": context.operator,
        "command": context.command,
        "adopted": differing,
        "files": {path: [entry.sha, entry.mode] for path, entry in entries.items()},
        "folders": index["folders"],
    }
    context.state.write_json(about, "bases", "%d.json" % number)
    releases.point_to(context.state, 0, number, None)
    context.wire.event("snapshot", files=len(entries), bytes=total)
    return releases.load(context.state, 0, number)


def _store(context, directory, path, sha):
    """Store a live file that was hashed a moment ago; returns its size."""
    try:
        with open(os.path.join(directory, path), "rb") as source:
            content = source.read()
    except FileNotFoundError:
        content = b""
    if objects.put(context.state, content, durable=False) != sha:
        raise Failure("%s changes while it is being read" % path, kind="changed-meanwhile", hint="try again")
    return len(content)


def _check_room(context, index):
    """Refuse a snapshot that the state's disk cannot hold before filling that disk with half of it."""
    needed = sum(-(-entry[0] // 4096) * 4096 for entry in index["files"].values())
    usage = os.statvfs(context.state.root)
    free = usage.f_bavail * usage.f_frsize
    if free < needed:
        raise Failure(
            "no space left on %s: a snapshot of the package needs %d MiB, %d MiB are free"
            % (context.state.root, -(-needed // 1048576), free // 1048576),
            kind="disk-full",
            hint="free some space there (df -h %s), or set another state_dir" % context.state.root,
        )


def _sha(entries, path):
    return entries[path].sha if path in entries else None


def _listed(paths, most=20):
    lines = ["  " + path for path in paths[:most]]
    if len(paths) > most:
        lines.append("  ... and %d more" % (len(paths) - most))
    return "\n".join(lines)


def drift_list(context, release, expected, entries, paths):
    """Drifted files: what the release has, what is there, and what the base has (None for no file)."""
    base = releases.base_of(context.state, release["base"])["files"]
    return [
        {
            "path": path,
            "expected": _sha(expected, path),
            "found": _sha(entries, path),
            "base": base[path][0] if path in base else None,
        }
        for path in paths
    ]


def drift_words(number, drift):
    """What is known of drifted files: that they differ, and how many are as in the base; not who changed them."""
    said = "%d file%s from release %d" % (len(drift), " differs" if len(drift) == 1 else "s differ", number)
    as_base = sum(entry["found"] == entry["base"] for entry in drift) if number else 0
    if as_base == 0:
        return said
    return "%s, %s as in the base" % (said, "all" if as_base == len(drift) else "%d of them" % as_base)


_HINT = "keep what was edited as a patch (the diff is in the output), or go on with --force: copies are kept"


def release_of_content(context, site):
    """The newest other release of this base whose files the drifted tree holds, 0 for the base itself, or None.

    A container made anew from its image, or a reinstall of the same wheel, puts the base back: nobody edited anything.
    """
    others = [entry for entry in reversed(releases.listing(context.state)) if entry["base"] == site.release["base"]]
    for release in [*others, releases.load(context.state, 0, site.release["base"])]:
        if not tree.differences(releases.expected(context.state, release), site.entries):
            return release["number"]
    return None


def drift_failure(context, site, message="", paths=None, hint=_HINT):
    """The refusal to touch hand-made edits, with their diff."""
    if paths is None:
        twin = release_of_content(context, site)
        if twin is not None:
            message = "not as in release %d: the package is %s again, put back from outside" % (
                site.release["number"],
                "its base" if twin == 0 else "release %d" % twin,
            )
            hint = "nothing was edited by hand, so nothing is lost: the same command with --force"
    paths = site.drifted if paths is None else paths
    drift = drift_list(context, site.release, site.expected, site.entries, paths)
    count = counted(len(paths), "file")
    said = "%s %s" % (count, message) if message else drift_words(site.release["number"], drift)
    return Failure(
        "%s:\n%s" % (said, _listed(paths)),
        kind="drift",
        hint=hint,
        exit_code=EXIT_DRIFT,
        status="drift",
        drift=drift,
        diff=drift_diff(context, site, paths),
    )


def drift_diff(context, site, paths):
    """Unified diff from the release to the live files, at most 200 lines."""

    def before(path):
        return objects.read(context.state, site.expected[path].sha) if path in site.expected else None

    def after(path):
        try:
            with open(os.path.join(site.package.directory, path), "rb") as source:
                return source.read()
        except OSError:
            return None

    return unified(((path, before(path), after(path)) for path in paths), _DIFF_LINES)


def unified(changes, most_lines=None):
    """A diff in git's form of [(path, old bytes, new bytes)], None for no file; binary files are named only."""
    lines = []
    for path, old, new in changes:
        if b"\0" in (old or b"") or b"\0" in (new or b""):
            lines.append("Binary files a/%s and b/%s differ\n" % (path, path))
            continue
        texts = [_lines(content or b"") for content in (old, new)]
        names = ("/dev/null" if old is None else "a/" + path, "/dev/null" if new is None else "b/" + path)
        lines.append("diff --git a/%s b/%s\n" % (path, path))
        if old is None or new is None:
            lines.append("%s file mode 100644\n" % ("new" if old is None else "deleted"))
        for line in difflib.unified_diff(texts[0], texts[1], names[0], names[1]):
            lines.append(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    if most_lines is not None and len(lines) > most_lines:
        lines[most_lines:] = ["... %d more lines\n" % (len(lines) - most_lines)]
    return "".join(lines)


def _lines(content):
    """Lines as diffs count them: a form feed or a lone carriage return ends none."""
    text = content.decode("utf-8", "backslashreplace")
    *whole, last = text.split("\n")
    return [line + "\n" for line in whole] + ([last] if last else [])
