"""Unified diffs, applied strictly: every hunk must fit where it says, to the byte. No fuzz, no search for an offset."""

import collections
import re

from .failure import Failure

FilePatch = collections.namedtuple("FilePatch", "old new hunks line mode crlf")
FilePatch.__doc__ = """One file of a diff.

old, new: paths as written, None for a side that does not exist. hunks: of Hunk, none for an empty file.
line: its line in the diff. mode: permission bits of a new file, where the diff says them, else None.
crlf: whether the diff's own header lines end in CRLF, that is, the diff as a whole was converted.
"""
Hunk = collections.namedtuple("Hunk", "start lines line header")
Hunk.__doc__ = "start: first old line (1-based). lines: [(tag, content bytes)] with tag ' ', '-' or '+'."

_HEADER = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)$")
_BINARY = re.compile(rb"^(GIT binary patch|Binary files .* differ)\s*$")
_ONLY_IN = re.compile(rb"^Only in (.+): (.+)$")
# diff -N writes a file that is not there with the time stamp of the epoch, in the reader's own time zone.
_EPOCH = re.compile(rb"^(1969-12-31|1970-01-01) ")
_QUOTED = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_ESCAPES = {b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}


# git's own, and those of diff.mnemonicPrefix.
_PREFIXES = ("a", "b", "c", "i", "o", "w")


def parse(content):
    """Read a diff (bytes): git's, or that of `diff -u`. Text before, between and after its files is skipped.

    Returns:
        A list of FilePatch.

    Raises:
        Failure: Binary patches, renames, mode changes, links, merges, bad headers or counts; names the diff's line.
    """
    return _Parser(content).files()


class _Parser:
    def __init__(self, content):
        self._lines = content.split(b"\n")
        if self._lines[-1] == b"":
            self._lines.pop()
        self._at = 0
        self._files = []

    def files(self):
        while self._at < len(self._lines):
            line = self._lines[self._at]
            if line.startswith(b"diff --git "):
                self._git_file()
            elif self._names_follow():
                self._file(None)
            else:
                self._refuse_what_cannot_be_skipped(line)
                self._at += 1
        if not self._files:
            raise _bad("no file in this diff (it needs `--- a/...`, `+++ b/...` and `@@` lines; diff -u)", 0)
        return self._files

    def _names_follow(self):
        return self._peek(0).startswith(b"--- ") and self._peek(1).startswith(b"+++ ")

    def _peek(self, ahead):
        return self._lines[self._at + ahead] if self._at + ahead < len(self._lines) else b""

    def _refuse_what_cannot_be_skipped(self, line):
        if _BINARY.match(line):
            raise _bad("binary patches cannot be applied", self._at)
        if line.startswith((b"diff --cc ", b"diff --combined ", b"@@@ ")):
            raise _bad("a merge's combined diff cannot be applied: make the diff against one parent", self._at)
        if line.startswith(b"@@ -"):
            raise _bad("a hunk without the lines `--- old` and `+++ new` before it", self._at)
        only = _ONLY_IN.match(line)
        if only and (self._files or self._peek(1).startswith((b"diff ", b"Only in ", b"--- "))):
            name = only.group(2).decode("utf-8", "replace")
            raise _bad("the diff leaves out the content of %s: make it with diff -N" % name, self._at)

    def _git_file(self):
        """A `diff --git` section: its extended header, then names and hunks, or an empty file made or removed."""
        began = self._at
        created = deleted = False
        mode = None
        self._at += 1
        while self._at < len(self._lines) and not self._names_follow():
            line = self._lines[self._at].rstrip(b"\r")
            word, _, rest = line.rpartition(b" ")
            if line.startswith((b"rename from ", b"rename to ", b"copy from ", b"copy to ")):
                raise _bad("renames and copies are not supported: make the diff with git diff --no-renames", self._at)
            if word in (b"old mode", b"new mode"):
                raise _bad("mode changes are not supported", self._at)
            if word == b"new file mode":
                created, mode = True, self._mode(rest)
            elif word == b"deleted file mode":
                deleted = True
            elif _BINARY.match(line):
                raise _bad("binary patches cannot be applied", self._at)
            elif not line.startswith((b"index ", b"similarity index ", b"dissimilarity index ")):
                break
            self._at += 1
        if self._names_follow():
            self._file(mode)
        elif created or deleted:
            name = _git_name(self._lines[began][len(b"diff --git ") :].rstrip(b"\r"), began)
            names = (None, name) if created else (name, None)
            self._files.append(FilePatch(names[0], names[1], [], began + 1, mode, False))

    def _mode(self, digits):
        kind = {b"120": "a symbolic link", b"160": "a submodule"}.get(digits[:3])
        if kind:
            raise _bad("the diff makes %s: only regular files are supported" % kind, self._at)
        return 0o755 if digits == b"100755" else 0o644

    def _file(self, mode):
        at = self._at
        crlf = self._lines[at].endswith(b"\r")
        old, new = _name(self._lines[at][4:]), _name(self._lines[at + 1][4:])
        self._at += 2
        hunks = []
        while self._peek(0).startswith(b"@@ "):
            hunks.append(self._hunk())
        if not hunks:
            raise _bad("no hunk for %s" % (new or old), at)
        if old is None and new is None:
            raise _bad("both sides are /dev/null", at)
        self._files.append(FilePatch(old, new, hunks, at + 1, mode, crlf))

    def _hunk(self):
        at = self._at
        match = _HEADER.match(self._lines[at].rstrip(b"\r"))
        if match is None:
            raise _bad("not a hunk header: %r" % self._lines[at][:80].decode("utf-8", "replace"), at)
        old_left, new_left = [1 if match.group(which) is None else int(match.group(which)) for which in (2, 4)]
        start = int(match.group(1))
        if old_left and not start:
            raise _bad("line numbers begin at 1", at)
        body: list[tuple[str, bytes]] = []
        self._at += 1
        while old_left or new_left:
            if self._at >= len(self._lines):
                raise _bad("the hunk is cut off: its header promises more lines", at)
            line = self._lines[self._at]
            tag = line[:1] or b" "  # editors strip the blank of an empty context line
            if tag == b"\\" and body:
                _cut_newline(body)
                self._at += 1
                continue
            if tag not in (b" ", b"-", b"+"):
                raise _bad("the hunk has fewer lines than its header says", self._at)
            old_left -= tag != b"+"
            new_left -= tag != b"-"
            if old_left < 0 or new_left < 0:
                raise _bad("the hunk has more lines than its header says", self._at)
            body.append((tag.decode(), line[1:] + b"\n"))
            self._at += 1
        if body and self._peek(0).startswith(b"\\"):
            _cut_newline(body)
            self._at += 1
        # The signature `-- ` of git format-patch may follow, and the next file; nothing else that looks like a line.
        after = self._peek(0)
        if after[:1] in (b" ", b"+", b"-") and after.rstrip() != b"--" and not self._names_follow():
            raise _bad("the hunk has more lines than its header says", self._at)
        return Hunk(start, body, at + 1, self._lines[at].decode("utf-8", "replace").rstrip("\r"))


def _cut_newline(body):
    tag, text = body[-1]
    body[-1] = (tag, text[:-1])


def _bad(message, position):
    return Failure(
        "the diff's line %d: %s" % (position + 1, message), kind="bad-diff", hint="make it again with git diff"
    )


def _name(raw):
    """The file of a `---` or `+++` line, None where it says there is none: time stamp cut, git's quoting undone."""
    raw = raw.rstrip(b"\r")
    quoted = _QUOTED.match(raw)
    name, _, stamp = (_unquoted(quoted.group(1)), b"", raw[quoted.end() :]) if quoted else raw.partition(b"\t")
    if name == b"/dev/null" or _EPOCH.match(stamp.lstrip(b"\t")):
        return None
    return name.decode("utf-8", "surrogateescape")


def _unquoted(raw):
    def character(match):
        code = match.group(1)
        return bytes([int(code, 8) & 0xFF]) if len(code) == 3 else _ESCAPES.get(code, code)

    return re.sub(rb"\\([0-7]{3}|.)", character, raw)


def _git_name(raw, position):
    """The file of a `diff --git a/NAME b/NAME` line, which alone names an empty file."""
    quoted = _QUOTED.match(raw)
    if quoted:
        return _unquoted(quoted.group(1)).decode("utf-8", "surrogateescape")
    half = len(raw) // 2
    first, second = raw[:half], raw[half + 1 :]
    # With --no-prefix the two are the same; else they differ in the letter before the slash.
    if len(raw) % 2 == 0 or (first != second and first[2:] != second[2:]):
        raise _bad("the file's name cannot be told from this line", position)
    return second.decode("utf-8", "surrogateescape")


def target_paths(files, package_name, exists):
    """The paths inside the package that the files of a diff mean.

    Accepts paths relative to the package, to its parent (`sglang/srt/x.py`), or to a source tree's root
    (`python/sglang/srt/x.py`), with or without git's a/ and b/. The files that must exist decide how new ones are read.

    Args:
        files: From `parse`.
        package_name: Import name of the package.
        exists: Callable that tells whether a relative path exists in the package.

    Returns:
        Relative paths, in the order of `files`.

    Raises:
        Failure: A path is absolute, climbs with `..`, or means no file of the package.
    """
    known, rooted = set(), False
    paths = {}
    creations = []
    for position, file_patch in enumerate(files):
        if file_patch.old is None:
            creations.append(position)
            known.update(_readings(file_patch.new, package_name).values())
            continue
        for name in [file_patch.new, file_patch.old]:
            found = [] if name is None else _existing(name, package_name, lambda path: exists(path) or path in known)
            if found:
                how, paths[position] = found[-1]
                rooted = rooted or how == "package"
                break
        else:
            raise _outside(file_patch.new or file_patch.old, package_name, "is not in the package")
    for position in creations:
        readings = _readings(files[position].new, package_name)
        if rooted and "package" not in readings:
            raise _outside(files[position].new, package_name, "lies outside the package")
        paths[position] = readings.get("package") or readings.get("git") or readings["plain"]
    return [paths[position] for position in range(len(files))]


def _existing(name, package_name, exists):
    return [(how, path) for how, path in _readings(name, package_name).items() if exists(path)]


def _readings(name, package_name):
    """What a path of a diff may mean: {"plain" as written, "git" without a/ or b/, "package" from the package on}."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or "\\" in name or "\0" in name or ".." in parts or not parts:
        raise _outside(name, package_name, "is outside the package")
    if ".git" in parts or "__pycache__" in parts:
        raise _outside(name, package_name, "is no file of a package")
    readings = {"plain": "/".join(parts)}
    if parts[0] in _PREFIXES and len(parts) > 1:
        parts = parts[1:]
        readings["git"] = "/".join(parts)
    if package_name in parts[:-1]:
        readings["package"] = "/".join(parts[parts.index(package_name) + 1 :])
    return readings


def _outside(name, package_name, reason):
    return Failure(
        "the diff names %s, which %s" % (name, reason),
        kind="bad-diff",
        hint="paths may be relative to the folder of %s, to its parent, or contain python/%s/; leave other files out"
        % (package_name, package_name),
    )


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
    if file_patch.old is None and content is not None:
        raise Failure("%s is to be created by the diff but exists" % shown, kind="hunk-failed", hint=_ANOTHER)
    if file_patch.old is not None and content is None:
        raise Failure("%s is to be changed by the diff but does not exist" % shown, kind="hunk-failed", hint=_ANOTHER)
    real = _split(content or b"")
    if file_patch.crlf and (content is None or any(not line.endswith(b"\r\n") for line in real[:-1] or real)):
        raise Failure(
            "%s: the diff has CRLF line ends throughout (line %d), the file %s"
            % (shown, file_patch.line, "would get them too" if content is None else "has not"),
            kind="crlf",
            hint="convert the diff: sed -i 's/\\r$//' FILE",
        )
    result = []
    position = 0
    for hunk in file_patch.hunks:
        old = [text for tag, text in hunk.lines if tag != "+"]
        start = hunk.start - 1 if old else hunk.start
        if start < position or start > len(real) or real[start : start + len(old)] != old:
            raise _misfit(hunk, old, real, start, position, shown)
        new = [text for tag, text in hunk.lines if tag != "-"]
        result.extend(real[position:start])
        position = start + len(old)
        # Only the very last line of a file may lack its newline.
        inner = result[-1:] + new[:-1] if position == len(real) else result[-1:] + new
        if new and not all(line.endswith(b"\n") for line in inner):
            raise _misfit(hunk, old, real, start, start, shown)
        result.extend(new)
    result.extend(real[position:])
    if file_patch.new is None:
        if result:
            raise Failure(
                "%s is to be deleted by the diff but has other lines too" % shown, kind="hunk-failed", hint=_ANOTHER
            )
        return None
    return b"".join(result)


_ANOTHER = "the file is not the one this diff was made from: make the diff again from the release it goes on"


def _split(content):
    """Lines with their newline, split at newline alone (a lone carriage return is content)."""
    lines = content.split(b"\n")
    last = lines.pop()
    return [line + b"\n" for line in lines] + ([last] if last else [])


def _misfit(hunk, old, real, start, position, shown):
    found = real[start : start + len(old)] or real[-3:]
    message, hint = "hunk does not fit", _ANOTHER
    if start < position:
        message = "hunk overlaps the one before it"
    elif start > len(real):
        message = "hunk does not fit: the file has only %d lines; it ends with" % len(real)
    elif real[start : start + len(old)] == old:
        message = "hunk says that the file ends here without a newline, but it goes on"
    elif [line.rstrip(b"\r\n") for line in old] == [line.rstrip(b"\r\n") for line in found]:
        if [line.rstrip(b"\n") for line in old] == [line.rstrip(b"\n") for line in found]:
            message = "the newline at the end of the file differs"
        else:
            message = "line ends differ: the %s has CRLF" % ("diff" if any(b"\r\n" in line for line in old) else "file")
            hint = "convert the diff's line ends to those of the file"
    wanted = [tag + text.decode("utf-8", "replace").rstrip("\n") for tag, text in hunk.lines]
    lines = ["  the hunk:"] + ["  | " + line for line in wanted] + ["  the file from line %d on:" % (start + 1)]
    lines += ["  | " + line.decode("utf-8", "replace").rstrip("\n") for line in found]
    text = "\n".join(lines).replace("\r", "\\r")
    return Failure(
        "%s line %d: %s (%s, line %d of the diff)\n%s" % (shown, start + 1, message, hunk.header, hunk.line, text),
        kind="hunk-failed",
        hint=hint,
    )
