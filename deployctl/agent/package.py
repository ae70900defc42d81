"""Finds the installed engine where the server would import it from, without importing it, and says where it came from.

"Came from" is what its files are compared with before the first push: the wheel's RECORD, or git's HEAD for source and
editable installs.
"""

import base64
import binascii
import collections
import csv
import hashlib
import importlib.util
import os
import re
import subprocess
import sys

from .failure import Failure

Package = collections.namedtuple("Package", "name directory version kind record git_root fingerprint warnings")
Package.__doc__ = """The installed package.

name: import name. directory: real path of its folder. version: from its metadata ("0+unknown" without any).
kind: wheel, editable, source (a git work tree) or plain. git_root: work tree or None.
record: {relative path: sha256 hex, or None where the RECORD has no such hash}, or None without a RECORD.
fingerprint: changes when the package is installed anew. warnings: texts for the user.
"""

_Distribution = collections.namedtuple("_Distribution", "at version record raw")
_Distribution.__doc__ = (
    """A distribution's metadata folder, its version, the RECORD's rows for the package, and whole."""
)

_GIT_DEADLINE_S = 30
_UNKNOWN_VERSION = "0+unknown"


def locate(context):
    """Find the package of `context.host`.

    Raises:
        Failure: Not installed, shadowed by a folder of its name, inside a zip file, or not a package.
    """
    name, search, found = _where(context, os.path.expanduser("~"), [])
    directory = os.path.realpath(found)
    warnings = _copies(name, directory, search)
    distributions = _distributions(name, {os.path.dirname(directory), os.path.dirname(found)}, search)
    owner = _owner(directory, [one for one in distributions if one.record is not None], warnings)
    if owner is not None:
        return Package(
            name, directory, owner.version, "wheel", owner.record, None, _fingerprint(owner), tuple(warnings)
        )
    pointer = distributions[0] if distributions else None
    version = pointer.version if pointer else _version_file(directory)
    if pointer is None:
        warnings.append("%s is imported from %s, where no installer put it" % (name, directory))
    if version == _UNKNOWN_VERSION:
        warnings.append("the version of %s in %s cannot be told: it counts as %s" % (name, directory, version))
    git_root, head = _work_tree(directory, warnings)
    if git_root:
        kind = "editable" if pointer else "source"
        return Package(name, directory, version, kind, None, git_root, "git:" + head, tuple(warnings))
    fingerprint = _fingerprint(pointer) if pointer else "plain:" + directory
    return Package(name, directory, version, "plain", None, None, fingerprint, tuple(warnings))


def imported_from(context, cwd, python_path=""):
    """The real folder that `python -m` would import the package of `context.host` from, in another place than usual.

    Args:
        context: Of the operation.
        cwd: The directory that it is started in.
        python_path: PYTHONPATH of its environment, where that is set anew.

    Raises:
        Failure: As `locate`.
    """
    return os.path.realpath(_where(context, cwd, python_path.split(os.pathsep))[2])


def hidden(context, release, cwd="", python_path=""):
    """Why a server would not run a release: a sentence that names the package it would import instead, or None.

    Args:
        context: Of the operation.
        release: The current release.
        cwd, python_path: As for `imported_from`; the home where no `cwd` is given.

    Raises:
        Failure: As `locate`.
    """
    found = imported_from(context, cwd or os.path.expanduser("~"), python_path)
    if found == release["package_dir"]:
        return None
    name = context.host.get("package") or "sglang"
    return "a server would import %s from %s; release %d of it is in %s" % (
        name,
        found,
        release["number"],
        release["package_dir"],
    )


# -- where it is -----------------------------------------------------------------------------------------------------


def _where(context, cwd, before):
    """(name, path that is searched, folder as the import system names it)."""
    name = context.host.get("package") or "sglang"
    search = [entry for entry in [*before, *context.server_path] if entry]
    if not getattr(sys.flags, "safe_path", False):
        search.insert(0, cwd)  # `python -m` puts the directory it is started in first
    spec, reason = _find(name, search)
    if spec is None:
        raise Failure(
            "package %s is not installed for %s%s" % (name, context.python, reason and ": " + reason),
            kind="package-missing",
            hint="set `python:` of this host to the interpreter that serves, or `package:` to what it serves",
        )
    return name, search, _folder(context, spec, search)


def _find(name, search):
    """(spec, reason): what the server's finders say to a top-level name, over `search` as sys.path; None with a reason.

    The finders of editable installs are asked too; nothing is imported.
    """
    if not name.isidentifier():
        return None, "%r is no import name of a package" % name
    saved_path, saved_module = list(sys.path), sys.modules.pop(name, None)
    sys.path[:] = search
    importlib.invalidate_caches()
    try:
        return importlib.util.find_spec(name), ""
    except Exception as error:
        return None, "%s: %s" % (type(error).__name__, error)
    finally:
        sys.path[:] = saved_path
        if saved_module is not None:
            sys.modules[name] = saved_module


def _folder(context, spec, search):
    """The folder of a spec, as the import system names it.

    Raises:
        Failure: A namespace folder, a single module, or a zip file.
    """
    folders = [str(entry) for entry in spec.submodule_search_locations or []]
    if spec.submodule_search_locations is None:
        raise Failure(
            "%s of %s is not a package but the module %s" % (spec.name, context.python, spec.origin),
            kind="package-missing",
            hint="set `package:` of this host to the import name of the engine",
        )
    if spec.origin is None or not spec.has_location:
        # A regular package further down the path would have won; an editable install's finder is asked last and loses.
        hidden = _find(spec.name, [entry for entry in search if not _holds(entry, folders)])[0]
        hint = "install %s for %s" % (spec.name, context.python)
        if hidden is not None and hidden.origin is not None:
            hint = "move that folder away or rename it: it hides %s" % os.path.dirname(hidden.origin)
        raise Failure(
            "%s finds no package %s but only a folder of that name without __init__.py: %s"
            % (context.python, spec.name, ", ".join(folders) or spec.origin),
            kind="package-shadowed",
            hint=hint,
        )
    if not os.path.isdir(folders[0]):
        raise Failure(
            "%s is imported from %s, which is not a folder (a zip file?): it cannot be patched"
            % (spec.name, folders[0]),
            kind="package-zipped",
            hint="install it unpacked: pip install",
        )
    return folders[0]


def _holds(entry, folders):
    return os.path.realpath(entry) in {os.path.dirname(os.path.realpath(folder)) for folder in folders}


def _copies(name, directory, search):
    """Warnings about copies of the package elsewhere on the path: they are the ones that do not serve."""
    copies = []
    for entry in search:
        other = os.path.realpath(os.path.join(entry, name))
        if other != directory and other not in copies and os.path.isfile(os.path.join(other, "__init__.py")):
            copies.append(other)
    return ["%s is also in %s, but %s is the one that is imported" % (name, other, directory) for other in copies]


# -- which installation put it there ---------------------------------------------------------------------------------


def _distributions(name, sites, search):
    """The distributions that concern the package: those whose RECORD lists files of it beside them, then those of its
    name that only point to it (editable installs, or without a RECORD).

    Args:
        name: Import name.
        sites: The folders that the package may be listed from: real and as on the path.
        search: The server's path.
    """
    named, others = [], []
    # One folder may stand on the path under two names (lib64 is a link to lib in virtual environments).
    real = list(dict.fromkeys(os.path.realpath(entry) for entry in [*sorted(sites), *search]))
    sites = {os.path.realpath(site) for site in sites}
    for site in real:
        for entry in _listdir(site):
            if not entry.endswith((".dist-info", ".egg-info")):
                continue
            stem = entry.rpartition(".")[0].split("-")[0]
            if re.sub(r"[-_.]+", "_", stem).lower() == name.lower():
                named.append((os.path.join(site, entry), site in sites))
            elif site in sites and entry.endswith(".dist-info"):
                others.append((os.path.join(site, entry), True))
    # The RECORDs of all distributions take long to read: only where no name fits (the package of another project).
    found = [_distribution(name, *pair) for pair in named]
    if not found:
        found = [one for one in (_distribution(name, *pair) for pair in others) if one and one.record]
    return sorted((one for one in found if one), key=lambda one: one.record is None)


def _distribution(name, at, beside):
    """The distribution of a metadata folder; None where its RECORD lists another copy of the package, beside itself."""
    raw = _read(os.path.join(at, "RECORD"))
    record = _read_record(raw, name)
    if record and not beside:
        return None
    return _Distribution(at, _metadata_version(at), record or None, raw)


def _listdir(folder):
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []  # an entry of the path that is not there, or a zip file, is normal


def _read(path):
    try:
        with open(path, "rb") as source:
            return source.read()
    except OSError:
        return b""


def _read_record(raw, name):
    """The rows of a RECORD that lie in the package."""
    prefix = name + "/"
    record: dict[str, str | None] = {}
    if (b"\n" + prefix.encode()) not in b"\n" + raw.replace(b'"', b""):
        return record
    for row in csv.reader(raw.decode("utf-8", "surrogateescape").replace("\r", "").split("\n")):
        if len(row) >= 2 and row[0].startswith(prefix):
            record[row[0][len(prefix) :]] = _sha256(row[1])
    return record


def _sha256(word):
    algorithm, _, encoded = word.partition("=")
    try:
        digest = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
    except (binascii.Error, ValueError):
        return None
    return digest.hex() if algorithm == "sha256" and len(digest) == 32 else None


def _owner(directory, listing, warnings):
    """The distribution that installed `directory`, of those that list files of it.

    Leftovers of an unclean upgrade list the same files: the one that fits what is there is taken, and the user told.
    Other projects that put files into the package (plug-ins) add to its record.
    """
    owners = [one for one in listing if "__init__.py" in one.record] or listing
    if not owners:
        return None
    owner = max(owners, key=lambda one: (_fit(directory, one.record), one.at))
    if len(owners) > 1:
        warnings.append(
            "several installs claim %s: %s; %s fits its files best"
            % (directory, ", ".join(one.at for one in owners), os.path.basename(owner.at))
        )
    return owner


def _fit(directory, record):
    """How many of a few recorded files are there as recorded; the version's own files first."""
    paths = sorted(record, key=lambda path: (not path.endswith("version.py"), path.count("/"), path))[:40]
    return sum(hashlib.sha256(_read(os.path.join(directory, path))).hexdigest() == record[path] for path in paths)


def _fingerprint(distribution):
    """Changes with every installation, also of the same version again: pip writes the RECORD anew each time."""
    path = os.path.join(distribution.at, "RECORD")
    written = os.stat(path).st_mtime_ns if os.path.exists(path) else 0
    return "record:%s:%s:%d" % (distribution.version, hashlib.sha256(distribution.raw).hexdigest(), written)


def _metadata_version(at):
    for name in ("METADATA", "PKG-INFO"):
        for line in _read(os.path.join(at, name)).decode("utf-8", "replace").splitlines():
            if line.lower().startswith("version:"):
                return line.split(":", 1)[1].strip()
            if not line:
                break  # the headers end here
    # A damaged one still has its version in the folder's name.
    return (os.path.basename(at).rpartition(".")[0].split("-") + [""])[1] or _UNKNOWN_VERSION


def _version_file(directory):
    for name in ("version.py", "_version.py", "__init__.py"):
        text = _read(os.path.join(directory, name))[:65536].decode("utf-8", "replace")
        match = re.search(r"^(?:__version__|version)\b[^=\n]*=\s*[\"']([^\"']+)[\"']", text, re.MULTILINE)
        if match:
            return match.group(1)
    return _UNKNOWN_VERSION


# -- git -------------------------------------------------------------------------------------------------------------


def _work_tree(directory, warnings):
    """(root, HEAD) of the git work tree that tracks the package, or (None, "").

    A package that merely lies below one (a virtual environment in a home directory under git) is not tracked by it.
    """
    folder = directory
    while not os.path.exists(os.path.join(folder, ".git")):
        if folder == os.path.dirname(folder):
            return None, ""
        folder = os.path.dirname(folder)
    status, output, complaint = _git(directory, "rev-parse", "--show-toplevel", "HEAD")
    if status == 0:
        root, head = output.decode("utf-8", "surrogateescape").rstrip("\n").rsplit("\n", 1)
        tracked = _git(directory, "ls-files", "-z", "--", "__init__.py")[1]
        return (root, head) if tracked else (None, "")
    warnings.append(
        "git cannot read the work tree %s (%s): edits made before the first push are not noticed" % (folder, complaint)
    )
    return None, ""


def _git(directory, *words):
    """(status, stdout bytes, complaint) of a reading git command in `directory`; status None where it could not run.

    `safe.directory=*` because root often works on a user's tree, whose code it runs anyway.
    """
    # A hook's GIT_DIR and the like would lead to another repository.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment.update(GIT_OPTIONAL_LOCKS="0", LC_ALL="C", GIT_CONFIG_COUNT="1")
    environment.update(GIT_CONFIG_KEY_0="safe.directory", GIT_CONFIG_VALUE_0="*")
    try:
        done = subprocess.run(
            ["git", "-C", directory, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=_GIT_DEADLINE_S,
            check=False,
            env=environment,
        )
    except OSError as error:
        return None, b"", "git: %s" % error.strerror
    except subprocess.TimeoutExpired:
        return None, b"", "git did not end within %d s" % _GIT_DEADLINE_S
    complaint = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return done.returncode, done.stdout, complaint[0] if complaint else "exit status %d" % done.returncode


# -- what differs ----------------------------------------------------------------------------------------------------


def differing_from_origin(package, hashes):
    """Relative paths that are not as they came: changed, added or missing; sorted.

    Args:
        package: What `locate` found.
        hashes: {relative path: sha256 hex} of every file found, bytecode left out.

    Raises:
        Failure: git cannot say (kind `git`).
    """
    if package.record is not None:
        return _from_record(package, hashes)
    if package.git_root is not None:
        # Not `git status`: it takes line ends that git itself converts for changes.
        changed = _paths(package, "diff", "--name-only", "-z", "--relative", "--no-renames", "--no-ext-diff", "HEAD")
        added = _paths(package, "ls-files", "-z", "--others", "--exclude-standard")
        return sorted(path for path in changed | added if not is_bytecode(path))
    return []


def _paths(package, *words):
    """What a git command lists for the package, relative to it."""
    status, listing, complaint = _git(package.directory, *words, "--", ".")
    if status != 0:
        raise Failure(
            "git cannot compare %s with HEAD: %s" % (package.directory, complaint),
            kind="git",
            hint="run git status there on the host",
        )
    return {path.decode("utf-8", "surrogateescape") for path in listing.split(b"\0") if path}


def _from_record(package, hashes):
    wanted = {path: digest for path, digest in package.record.items() if not is_bytecode(path)}
    differing = {
        path
        for path in set(wanted) | set(hashes)
        if path not in wanted or path not in hashes or (wanted[path] is not None and wanted[path] != hashes[path])
    }
    extra = {path for path in differing if path not in wanted}
    if extra:
        # Plug-ins are other projects that put files into the package: what their RECORD lists is as it came, too.
        site = os.path.dirname(package.directory)
        for entry in _listdir(site):
            if entry.endswith(".dist-info"):
                listed = _read_record(_read(os.path.join(site, entry, "RECORD")), os.path.basename(package.directory))
                differing -= {path for path in extra if path in listed and listed[path] in (None, hashes[path])}
    return sorted(differing)


def is_bytecode(path):
    """Whether a relative path is compiled bytecode, which comes and goes."""
    return path.endswith((".pyc", ".pyo")) or "__pycache__" in path.split("/")
