"""Releases and bases as they lie in the state directory, and the arithmetic of the stack."""

import os
import time

from . import tree
from .failure import EXIT_USAGE, Failure
from .shapes import NUMBER, OneOf, misfit

# How many of the latest transactions current.json names, for those who ask what became of theirs.
_REMEMBERED = 50


_POINTER = {"release": int, "base": int, "at": NUMBER, "move": int, "recent": [(OneOf((str, None)), int)]}
_FILES = {"*": {"sha": OneOf((str, None)), "mode": int}}
_LAYER = {
    "ref": str,
    "series": str,
    "version": str,
    "kind": str,
    "filename": str,
    "sha256": str,
    "metadata": dict,
    "files": dict,
    "result": _FILES,
}
_RELEASE = {
    "number": int,
    "parent": int,
    "base": int,
    "package_dir": str,
    "version": str,
    "at": NUMBER,
    "by": str,
    "command": str,
    "patches": [_LAYER],
    "files": _FILES,
}
_BASE = {
    "package": str,
    "package_dir": str,
    "version": str,
    "fingerprint": str,
    "python": str,
    "at": NUMBER,
    "by": str,
    "command": str,
    "files": {"*": (str, int)},
    "folders": [str],
}


def checked(state, parts, shape):
    """A state file that must have a shape (see `shapes.misfit`), or None where there is none.

    Raises:
        Failure: It has not (kind `state-damaged`, exit 8).
    """
    found = state.read_json(*parts)
    if found is None:
        return None
    missing = [key for key in shape if key not in found]
    if missing:
        raise state.damaged("it does not hold %s" % ", ".join(missing), *parts)
    wrong = misfit(found, shape)
    if wrong is not None:
        raise state.damaged("%s is not what it should be" % wrong, *parts)
    return found


def pointer(state):
    """What current.json says: {release, base, transaction, at, move, recent}; base None before the first push."""
    found = checked(state, ("current.json",), _POINTER)
    return found or {"release": None, "base": None, "transaction": None, "at": 0.0, "move": 0, "recent": []}


def point_to(state, number, base, transaction):
    """Write current.json: the release that the tree is at from now on."""
    before = pointer(state)
    state.write_json(
        {
            "release": number,
            "base": base,
            "transaction": transaction,
            "at": time.time(),
            "move": before["move"] + 1,
            "recent": (before["recent"] + [[transaction, number]])[-_REMEMBERED:],
        },
        "current.json",
    )


def current(state):
    """The current release (a dict; release 0 is the base), or None before the first push.

    Raises:
        Failure: The state is damaged (exit 8).
    """
    now = pointer(state)
    if now["release"] is None:
        return None
    try:
        return load(state, now["release"], now["base"])
    except Failure as failure:
        if failure.kind == "unknown-release":
            raise state.damaged("it names release %s, which is missing" % now["release"], "current.json") from None
        raise


def load(state, number, base=None):
    """A release by number.

    Args:
        state: The state directory.
        number: 0 for the base.
        base: Which base, for release 0; that of the current release where not given.

    Raises:
        Failure: There is none (exit 2), listing what exists; or damaged (exit 8).
    """
    if number == 0:
        base = base if base is not None else pointer(state)["base"]
        about = base_of(state, base)
        return {
            "number": 0,
            "parent": None,
            "base": base,
            "package": about["package"],
            "package_dir": about["package_dir"],
            "version": about["version"],
            "python": about["python"],
            "at": about["at"],
            "by": about["by"],
            "command": about["command"],
            "transaction": None,
            "patches": [],
            "files": {},
        }
    found = checked(state, ("releases", "%d.json" % number), _RELEASE)
    if found is None:
        known = ", ".join(str(entry) for entry in numbers(state)) or "none"
        raise Failure(
            "there is no release %d" % number,
            kind="unknown-release",
            hint="releases: 0 (base), %s; see deployctl history" % known,
            exit_code=EXIT_USAGE,
        )
    return found


def numbers(state):
    """All release numbers but 0, ascending."""
    try:
        names = os.listdir(state.path("releases"))
    except OSError:
        return []
    return sorted(int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdigit())


def listing(state):
    """All releases but 0, oldest first."""
    return [load(state, number) for number in numbers(state)]


def base_of(state, base):
    """A base: {package, package_dir, version, fingerprint, python, at, by,
    files: {path: [sha, mode]}, folders}.

    Raises:
        Failure: Missing or damaged (exit 8).
    """
    parts = ("bases", "%s.json" % base)
    found = checked(state, parts, _BASE)
    if found is None:
        raise state.damaged("it is missing", *parts)
    return found


def expected(state, release):
    """What the tree holds at a release: {path: Entry}."""
    entries = {path: tree.Entry(*pair) for path, pair in base_of(state, release["base"])["files"].items()}
    overlay(entries, release["files"])
    return entries


def overlay(entries, files):
    """Lay {path: {sha, mode}} over entries; a sha of None takes the file away."""
    for path, change in files.items():
        if change["sha"] is None:
            entries.pop(path, None)
        else:
            entries[path] = tree.Entry(change["sha"], change["mode"])


def references(release):
    """The stack, bottom first, as `series/version`."""
    return [patch["ref"] for patch in release["patches"]]


def new_stack(release, patch):
    """Where a patch goes: (kept layers, patches to apply above them).

    Its series' earlier version is replaced in place, so everything above is applied anew; otherwise it goes on top.

    Raises:
        Failure: A series that it requires does not lie below it (exit 2).
    """
    stack = release["patches"]
    at = next((place for place, layer in enumerate(stack) if layer["series"] == patch["series"]), len(stack))
    below = [layer["series"] for layer in stack[:at]]
    for series in patch["metadata"].get("requires") or []:
        if series not in below:
            raise Failure(
                "%s requires the series %s below it" % (patch["ref"], series),
                kind="requires",
                hint="deployctl push --patch %s/VERSION first" % series,
                exit_code=EXIT_USAGE,
            )
    return stack[:at], [patch] + stack[at + 1 :]


def find(state, target, now):
    """The release that a rollback means.

    Args:
        state: The state directory.
        target: None (the one before), a number, "base", or `series/version` (the newest whose stack holds it).
        now: The current release.

    Raises:
        Failure: Unknown, or made on an earlier install of the package (exit 2).
    """
    if target is None:
        if now["number"] == 0:
            raise Failure(
                "the host is at the base: there is nothing to roll back",
                kind="nothing-to-roll-back",
                hint="deployctl history",
                exit_code=EXIT_USAGE,
            )
        target = now["parent"]
    if target == "base":
        target = 0
    if isinstance(target, str) and not target.lstrip("-").isdigit():
        matches = [entry for entry in listing(state) if any(same_reference(ref, target) for ref in references(entry))]
        if not matches:
            known = sorted({ref for entry in listing(state) for ref in references(entry)})
            raise Failure(
                "no release holds %s" % target,
                kind="unknown-release",
                hint="patches in releases: %s; see deployctl history" % (", ".join(known) or "none"),
                exit_code=EXIT_USAGE,
            )
        found = matches[-1]
    else:
        found = load(state, int(target), now["base"])
    if found["base"] != now["base"]:
        raise Failure(
            "release %d belongs to an earlier install of the package (%s)" % (found["number"], found["version"]),
            kind="other-base",
            hint="push its patch again onto the package as it is installed now",
            exit_code=EXIT_USAGE,
        )
    return found


def same_reference(reference, word):
    """Whether `word` names the reference, whole or by its version alone."""
    return word in (reference, reference.partition("/")[2])
