"""How the patch scripts edit: marked blocks, a guard, and all files or none.

Included in each generated script by tools/build_patches.py. Standard library only, Python 3.8 and newer.

A block stands between `# >>> NAME HASH` and `# <<< NAME`; HASH is of what is between. So a file tells by itself whether
it is as the engine's makers left it, patched by this revision, patched by another revision, or patched and then edited
by hand; only the last is refused.
"""

import ast
import base64
import difflib
import hashlib
import importlib.util
import os
import sys
import tempfile


class Refused(Exception):
    """The package is in a state that must not be patched; nothing was written."""


def package_folder(package):
    """The folder to patch: argv[1], else deployctl's, else where this interpreter would import `package` from."""
    named = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("DEPLOYCTL_PACKAGE_DIR")
    if named:
        return named
    spec = importlib.util.find_spec(package)  # imports nothing: a plain name has no parent
    if spec is None or not spec.submodule_search_locations:
        raise Refused("%s is not installed for %s" % (package, sys.executable))
    return list(spec.submodule_search_locations)[0]


def block(name, text, indent=0):
    """`text` between marks, indented."""
    lines = [" " * indent + line if line else "" for line in text.strip("\n").split("\n")]
    body = "".join(line + "\n" for line in lines)
    return "%s# >>> %s %s\n%s%s# <<< %s\n" % (" " * indent, name, _short_hash(body), body, " " * indent, name)


def without_blocks(name, path, text):
    """(`text` without the blocks of `name`, whether each block is as it was written).

    Raises:
        Refused: A block that does not end.
    """
    kept, body, whole, opened = [], None, True, ""
    for line in text.splitlines(True):
        word = line.strip()
        if body is None and word.startswith("# >>> %s " % name):
            body, opened = [], word.rpartition(" ")[2]
        elif body is not None and word == "# <<< %s" % name:
            whole, body = whole and _short_hash("".join(body)) == opened, None
        elif body is not None:
            body.append(line)
        else:
            kept.append(line)
    if body is not None:
        raise Refused("%s: a block of %s has no end: restore the file, then run this again" % (path, name))
    return "".join(kept), whole


def insert_after(path, text, anchor, addition):
    """`addition` behind `anchor`, which must occur exactly once."""
    return _beside(path, text, anchor, anchor + addition)


def insert_before(path, text, anchor, addition):
    """`addition` in front of `anchor`, which must occur exactly once."""
    return _beside(path, text, anchor, addition + anchor)


def _beside(path, text, anchor, replacement):
    if text.count(anchor) != 1:
        raise Refused("%s: the anchor %r occurs %d times, not once" % (path, anchor.strip(), text.count(anchor)))
    return text.replace(anchor, replacement)


def _short_hash(text):
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:12]


def record_hash(text):
    """The hash that a wheel's RECORD holds for a file."""
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode("utf-8")).digest()).rstrip(b"=").decode("ascii")


def definitions(text):
    """{qualified name: (hash of its lines, first line)} of a module's functions, and its classes' methods."""
    found = {}
    module, lines = ast.parse(text), text.splitlines(True)
    for holder in [module] + [node for node in module.body if isinstance(node, ast.ClassDef)]:
        prefix = holder.name + "." if isinstance(holder, ast.ClassDef) else ""
        for node in holder.body:
            if isinstance(node, ast.FunctionDef):
                found[prefix + node.name] = (
                    _short_hash("".join(lines[node.lineno - 1 : node.end_lineno])),
                    node.lineno,
                )
    return found


def guard(folder, known, originals):
    """Refuse an engine that is not one of those this patch was written against.

    A file is known by the hash in the RECORD of a published wheel. One that is not (another patch lies below, a source
    tree, a later release) is judged by the functions that the patch wraps or relies on.

    Args:
        folder: The package folder.
        known: {file: {"files": [RECORD hashes], "functions": {qualified name: [hashes]}}}.
        originals: {file: text} without our blocks, where already read.

    Raises:
        Refused: Names every function that is missing or different.
    """
    problems = []
    for relative, facts in sorted(known.items()):
        text = originals[relative] if relative in originals else read(folder, relative)
        if not facts["functions"] or record_hash(text) in facts["files"]:
            continue
        found = definitions(text)
        for name, hashes in sorted(facts["functions"].items()):
            if name not in found:
                problems.append("%s: no %s" % (relative, name))
            elif found[name][0] not in hashes:
                problems.append("%s:%d %s is not as in any release known here" % (relative, found[name][1], name))
    if problems:
        raise Refused("this engine is not one that the patch is for, or was edited:\n  " + "\n  ".join(problems))


def exists(folder, relative):
    """Whether there is such a file, or a link of that name."""
    return os.path.lexists(os.path.join(folder, relative))


def read(folder, relative):
    """A file's text, line ends as they are.

    Raises:
        Refused: Not there, or not text.
    """
    path = os.path.join(folder, relative)
    try:
        with open(path, encoding="utf-8", newline="") as source:
            return source.read()
    except OSError as error:
        raise Refused("%s: %s" % (path, error.strerror)) from error
    except UnicodeDecodeError as error:
        raise Refused("%s: not UTF-8 text" % path) from error


def plan(name, folder, edits, known):
    """{file: new text} of what must be written; nothing is written yet.

    Args:
        name: `series/version`.
        folder: The package folder.
        edits: {file: callable(path, text) → text}. A file whose text is "" is a new one.
        known: See guard().

    Raises:
        Refused: See there; also a block that was edited by hand, with the difference.
    """
    series = name.partition("/")[0]
    texts, originals, edited_by_hand = {}, {}, []
    for relative in edits:
        is_there = relative in known or exists(folder, relative)
        texts[relative] = read(folder, relative) if is_there else ""
        originals[relative], whole = without_blocks(name, relative, texts[relative])
        for number, line in enumerate(originals[relative].splitlines(), 1):
            if line.strip().startswith("# >>> %s/" % series):
                other = line.split()[2]
                raise Refused("%s:%d is patched already by %s: roll back first" % (relative, number, other))
        if not whole:
            edited_by_hand.append(relative)
        if relative not in known and originals[relative]:
            raise Refused("%s is there already, and not from this patch" % relative)
    guard(folder, known, originals)
    wanted = {relative: edit(relative, originals[relative]) for relative, edit in edits.items()}
    for relative, text in wanted.items():
        ast.parse(text, relative)
    if edited_by_hand:
        raise Refused(
            "edited by hand since %s was applied (-: as applied, +: as it is); restore, then run this again:\n%s"
            % (name, "".join(_difference(relative, wanted[relative], texts[relative]) for relative in edited_by_hand))
        )
    return {relative: text for relative, text in wanted.items() if text != texts[relative]}


def _difference(relative, wanted, found):
    lines = difflib.unified_diff(wanted.splitlines(True), found.splitlines(True), relative, relative)
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)


def write_all(folder, texts):
    """Write all files, or none: each beside its place, flushed, with the old one's mode, then renamed."""
    before = {}
    try:
        for relative, text in texts.items():
            path = os.path.join(folder, relative)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            before[path] = read(folder, relative) if exists(folder, relative) else None
            _replace(path, text)
    except BaseException:
        for path, text in before.items():
            if text is not None:
                _replace(path, text)
            elif os.path.lexists(path):
                os.unlink(path)
        raise


def _replace(path, text):
    path = os.path.realpath(path)
    mode = os.stat(path).st_mode & 0o7777 if os.path.exists(path) else 0o644
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".deployctl-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def run(name, package, edits_for, known):
    """The script: plan, write, say what was done. Exit status 1 with the reason where it is refused.

    Args:
        name: `series/version`.
        package: The package's name.
        edits_for: Callable(folder) → edits, see plan().
        known: See guard(). A file that nothing relies on counts only where it is edited.
    """
    try:
        folder = package_folder(package)
        edits = edits_for(folder)
        known = {relative: facts for relative, facts in known.items() if facts["functions"] or relative in edits}
        texts = plan(name, folder, edits, known)
        write_all(folder, texts)
    except Refused as refused:
        sys.exit("%s: %s" % (name, refused))
    except OSError as error:
        sys.exit("%s: %s: %s" % (name, error.filename, error.strerror))
    for relative in edits:
        print("%s: %s" % (relative, "patched" if relative in texts else "already patched"))
