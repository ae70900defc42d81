"""Unified diffs, applied strictly: every hunk must fit where it says, to the byte. No fuzz, no search for an offset."""

import collections
import re

from .failure import Failure

FilePatch = collections.namedtuple("FilePatch", "old new hunks line")
FilePatch.__doc__ = "One file of a diff: old and new path (None for /dev/null), its hunks, its line in the diff."
Hunk = collections.namedtuple("Hunk", "start lines line header")
Hunk.__doc__ = "start: first old line (1-based). lines: [(tag, content bytes)] with tag ' ', '-' or '+'."

_HEADER = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)$")


def parse(content):
    """Read a diff (bytes); whatever stands before the first file, metadata block included, is skipped.

    Returns:
        A list of FilePatch.

    Raises:
        Failure: Binary patches, renames, mode-only changes, bad hunk headers or counts; names the diff's line.
    """
    lines = content.split(b"\n")
    if lines and lines[-1] == b"":
        lines.pop()
    files = []
    position = 0
    while position < len(lines):
        line = lines[position]
        if line.startswith((b"GIT binary patch", b"Binary files ")):
            raise _bad("binary patches cannot be applied", position)
        if line.startswith((b"rename from ", b"rename to ", b"copy from ", b"copy to ")):
            raise _bad("renames and copies are not supported: write them as a deletion and a new file", position)
        if line.startswith((b"old mode ", b"new mode ")):
            raise _bad("mode changes are not supported", position)
        if line.startswith(b"--- ") and position + 1 < len(lines) and lines[position + 1].startswith(b"+++ "):
            file_patch, position = _file(lines, position)
            files.append(file_patch)
        elif line.startswith(b"@@ -"):
            raise _bad("a hunk without the lines `--- old` and `+++ new` before it", position)
        else:
            position += 1
    if not files:
        raise _bad("no file in this diff (it needs `--- a/...`, `+++ b/...` and `@@` lines)", 0)
    return files


def _bad(message, position):
    return Failure(
        "the diff's line %d: %s" % (position + 1, message),
        kind="bad-diff",
        hint="make it again with git diff",
        exit_code=1,
    )


def _file(lines, position):
    at = position
    old, new = _name(lines[position][4:]), _name(lines[position + 1][4:])
    position += 2
    hunks = []
    while position < len(lines) and lines[position].startswith(b"@@ "):
        hunk, position = _hunk(lines, position)
        hunks.append(hunk)
    if not hunks:
        raise _bad("no hunk for %s" % (new or old), at)
    if old is None and new is None:
        raise _bad("both sides are /dev/null", at)
    return FilePatch(old, new, hunks, at + 1), position


def _name(raw):
    """A file name of a `---` or `+++` line: tab and time stamp cut, git's quoting undone."""
    raw = raw.rstrip(b"\r")
    if raw.startswith(b'"'):
        end = raw.rfind(b'"')
        raw = re.sub(rb"\\([0-7]{3}|.)", _unquote, raw[1:end])
    else:
        raw = raw.split(b"\t")[0]
    return None if raw == b"/dev/null" else raw.decode("utf-8", "surrogateescape")


def _unquote(match):
    code = match.group(1)
    if len(code) == 3:
        return bytes([int(code, 8)])
    return {b"n": b"\n", b"t": b"\t", b"r": b"\r"}.get(code, code)


def _hunk(lines, position):
    match = _HEADER.match(lines[position].rstrip(b"\r"))
    if match is None:
        raise _bad("not a hunk header: %r" % lines[position][:80].decode("utf-8", "replace"), position)
    at = position
    old_left = int(match.group(2) if match.group(2) is not None else 1)
    new_left = int(match.group(4) if match.group(4) is not None else 1)
    start = int(match.group(1))
    body = []
    position += 1
    while old_left or new_left:
        if position >= len(lines):
            raise _bad("the hunk is cut off: its header promises more lines", at)
        line = lines[position]
        tag = line[:1] or b" "
        if tag not in (b" ", b"-", b"+"):
            if line.startswith(b"\\") and body:
                body[-1] = (body[-1][0], body[-1][1][:-1])
                position += 1
                continue
            raise _bad("the hunk has fewer lines than its header says", position)
        if tag != b"+":
            old_left -= 1
        if tag != b"-":
            new_left -= 1
        if old_left < 0 or new_left < 0:
            raise _bad("the hunk has more lines than its header says", position)
        body.append((tag.decode(), line[1:] + b"\n"))
        position += 1
    if position < len(lines) and lines[position].startswith(b"\\"):
        body[-1] = (body[-1][0], body[-1][1][:-1])
        position += 1
    return Hunk(start, body, at + 1, lines[at].decode("utf-8", "replace")), position


def target_path(file_patch, package_name, exists):
    """The path inside the package that a file of the diff means.

    Accepts paths relative to the package, to its parent, and with git's a/ b/ or a source tree's `python/` in front.

    Args:
        file_patch: From `parse`.
        package_name: Import name of the package.
        exists: Callable that tells whether a relative path exists in the package.
    """
    name = file_patch.new if file_patch.new is not None else file_patch.old
    if name.startswith("/") or "\\" in name or ".." in name.split("/"):
        raise Failure("the diff names %s, which is outside the package" % name, kind="bad-diff")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    candidates = [parts]
    if parts and parts[0] in ("a", "b"):
        candidates.append(parts[1:])
    for option in list(candidates):
        for position, part in enumerate(option[:-1]):
            if part == package_name:
                candidates.append(option[position + 1 :])
                break
    for option in reversed(candidates):
        if option and exists("/".join(option)):
            return "/".join(option)
    # A new file: the most specific reading.
    return "/".join(candidates[-1])


def apply(content, file_patch, shown):
    """The new content of a file.

    Args:
        content: Old bytes, or None where the file does not exist.
        file_patch: From `parse`.
        shown: The path for error messages.

    Returns:
        New bytes, or None when the diff deletes the file.

    Raises:
        Failure: A hunk does not fit; the message shows the hunk and the file's real lines.
    """
    if file_patch.old is None:
        if content is not None:
            raise Failure("%s is to be created by the diff but exists" % shown, kind="hunk-failed")
        return b"".join(text for tag, text in file_patch.hunks[0].lines if tag == "+")
    if content is None:
        raise Failure("%s is to be changed by the diff but does not exist" % shown, kind="hunk-failed")
    real = _split(content)
    result = []
    position = 0
    for hunk in file_patch.hunks:
        old = [text for tag, text in hunk.lines if tag != "+"]
        start = hunk.start - 1 if old else hunk.start
        if start < position or real[start : start + len(old)] != old:
            raise _misfit(hunk, old, real, start, position, shown)
        result.extend(real[position:start])
        result.extend(text for tag, text in hunk.lines if tag != "-")
        position = start + len(old)
    result.extend(real[position:])
    if file_patch.new is None:
        if result:
            raise Failure("%s is to be deleted by the diff but has other lines too" % shown, kind="hunk-failed")
        return None
    return b"".join(result)


def _split(content):
    """Lines with their newline, split at newline alone (a lone carriage return is content)."""
    lines = content.split(b"\n")
    last = lines.pop()
    return [line + b"\n" for line in lines] + ([last] if last else [])


def _misfit(hunk, old, real, start, position, shown):
    wanted = [line.decode("utf-8", "replace").rstrip("\n") for line in old]
    found = [line.decode("utf-8", "replace").rstrip("\n") for line in real[max(start, 0) : start + len(old)]]
    hint = "the file is not the one this diff was made from: make the diff again from the release it goes on"
    if start < position:
        message = "hunk overlaps the one before it"
    elif [line.rstrip("\r") for line in wanted] == [line.rstrip("\r") for line in found]:
        message = "line ends differ: one of diff and file has CRLF"
        hint = "convert the diff's line ends to those of the file"
    else:
        message = "hunk does not fit"
    show = "\n".join(
        ["  wanted:"] + ["  | " + line for line in wanted] + ["  found:"] + ["  | " + line for line in found]
    )
    return Failure(
        "%s line %d: %s (%s, line %d of the diff)\n%s" % (shown, start + 1, message, hunk.header, hunk.line, show),
        kind="hunk-failed",
        hint=hint,
    )
