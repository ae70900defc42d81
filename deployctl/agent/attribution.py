"""Which lines of a release's files came from which patch."""

import difflib

from . import objects


def added_lines(state, release, paths=None):
    """The lines that patches added or changed.

    Args:
        state: The state directory.
        release: A release.
        paths: Only these files (relative), or None for all changed ones.

    Returns:
        {relative path: {line number (from 1): "series/version"}} in the release's final files.
    """
    result: dict = {}
    for layer in release["patches"]:
        for path, change in layer["files"].items():
            if paths is not None and path not in paths:
                continue
            before = _lines(state, change["before"])
            after = _lines(state, change["after"])
            result[path] = _carry(before, after, result.get(path, {}), layer["ref"])
    return result


def line_of(state, release, path, number):
    """The text of a line as the release has it, stripped; "" where it has no such line.

    A traceback shows the file as it is at that moment: after a rollback under a running server, another text.
    """
    change = release["files"].get(path)
    lines = _lines(state, change["sha"]) if change else []
    return lines[number - 1].strip().decode("utf-8", "backslashreplace") if 0 < number <= len(lines) else ""


def _lines(state, sha):
    return objects.read(state, sha).split(b"\n") if sha is not None else []


def _carry(before, after, owners, reference):
    """Owners of `after`'s lines from those of `before`'s: unchanged lines keep theirs, all others are the patch's."""
    head = 0
    while head < len(before) and head < len(after) and before[head] == after[head]:
        head += 1
    tail = 0
    while tail < len(before) - head and tail < len(after) - head and before[-1 - tail] == after[-1 - tail]:
        tail += 1
    carried = {line: owner for line, owner in owners.items() if line <= head}
    shift = len(after) - len(before)
    carried.update({line + shift: owner for line, owner in owners.items() if line > len(before) - tail})
    middle_before = before[head : len(before) - tail]
    middle_after = after[head : len(after) - tail]
    # In files of thousands of lines blank lines and lone brackets are no anchors: with them a crash would be named a
    # second later for each file.
    matcher = difflib.SequenceMatcher(None, middle_before, middle_after, autojunk=True)
    for tag, old_from, old_to, new_from, new_to in matcher.get_opcodes():
        if tag == "equal":
            for offset in range(old_to - old_from):
                owner = owners.get(head + old_from + offset + 1)
                if owner is not None:
                    carried[head + new_from + offset + 1] = owner
        else:
            for position in range(new_from, new_to):
                carried[head + position + 1] = reference
    return carried
