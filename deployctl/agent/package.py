"""Finds the installed engine where the server would import it from, without importing it, and says where it came from.

"Came from" is what its files are compared with before the first push: the wheel's RECORD, or git's HEAD for source and
editable installs.
"""

import base64
import collections
import csv
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import re
import subprocess
import sys

from .failure import Failure

Package = collections.namedtuple("Package", "name directory version kind record git_root fingerprint warnings")
Package.__doc__ = """The installed package.

name: import name. directory: real path of its folder. version: from its dist-info ("0+unknown" without one).
kind: wheel, editable, source (a git work tree) or plain. record: {relative path: sha256 hex} or None.
git_root: work tree or None. fingerprint: changes when the package is installed anew. warnings: texts for the user.
"""

_GIT_DEADLINE_S = 30


def locate(context):
    """Find the package of `context.host`.

    Raises:
        Failure: Not installed, shadowed by a namespace folder, inside a zip file, or not a package.
    """
    name = context.host.get("package") or "sglang"
    home = os.path.expanduser("~")
    search = [home] + [entry for entry in context.server_path if entry]
    spec = _find(name, search)
    warnings = []
    if spec is None:
        raise Failure(
            "package %s is not installed for %s" % (name, context.python),
            kind="package-missing",
            hint="set `python:` of this host to the interpreter that serves, or `package:` to what it serves",
        )
    locations = list(spec.submodule_search_locations or [])
    if spec.origin is None or not spec.has_location or not locations:
        found = ", ".join(str(entry) for entry in locations) or str(spec.origin)
        raise Failure(
            "%s found no package %s, only a folder of that name without __init__.py: %s"
            % (context.python, name, found),
            kind="package-shadowed",
            hint="move that folder away, or install the package for this interpreter",
        )
    directory = os.path.realpath(locations[0])
    if not os.path.isdir(directory):
        raise Failure("%s is not a folder (a zip import?): it cannot be patched" % locations[0], kind="package-zipped")
    if os.path.dirname(os.path.realpath(locations[0])) == os.path.realpath(home):
        warnings.append("%s is imported from the home directory %s, as the server would" % (name, home))
    parent = os.path.dirname(directory)
    dist = _distribution(name, directory, search, warnings)
    if dist is not None and dist["record"] is not None:
        return Package(
            name, directory, dist["version"], "wheel", dist["record"], None, dist["fingerprint"], tuple(warnings)
        )
    git_root = _git(directory, "rev-parse", "--show-toplevel")
    version = dist["version"] if dist else _version_file(directory)
    if git_root:
        head = _git(directory, "rev-parse", "HEAD") or ""
        kind = "editable" if dist else "source"
        return Package(name, directory, version, kind, None, git_root, "git:" + head, tuple(warnings))
    fingerprint = dist["fingerprint"] if dist else "plain:" + parent
    return Package(name, directory, version, "plain", None, None, fingerprint, tuple(warnings))


def _find(name, search):
    """The spec of a top-level name as the server's interpreter finds it: its finders, over `search` as sys.path."""
    saved = list(sys.path)
    sys.path[:] = search
    sys.path_importer_cache.clear()
    try:
        sys.modules.pop(name, None)
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    finally:
        sys.path[:] = saved


def _distribution(name, directory, search, warnings):
    """The dist-info that put `directory` there, as {version, record|None, fingerprint}, or None.

    A RECORD that lists files of the package beside the dist-info itself makes it a wheel install; a dist-info whose
    RECORD lists none (only a .pth or a finder) makes it an editable one.
    """
    parent = os.path.dirname(directory)
    folder_name = os.path.basename(directory)
    editable = None
    candidates = []
    for site in [parent] + [entry for entry in search if entry != parent]:
        try:
            entries = sorted(os.listdir(site))
        except OSError:
            continue  # a path entry that is not there is normal
        for entry in entries:
            if not entry.endswith(".dist-info"):
                continue
            info = os.path.join(site, entry)
            near = re.sub(r"[-_.]+", "_", entry.split("-")[0]).lower() == name.lower()
            if site != parent and not near:
                continue
            # Reading the RECORD of every distribution would cost more than all else: names that match come first.
            candidates.append((0 if near else 1, info, site))
    matches = []
    for rank, info, site in sorted(candidates):
        if rank == 1 and matches:
            break
        record_path = os.path.join(info, "RECORD")
        try:
            with open(record_path, "rb") as source:
                raw = source.read()
        except OSError:
            continue
        if site == parent and (b"\n" + folder_name.encode() + b"/") in b"\n" + raw:
            record = _read_record(raw, folder_name)
            fingerprint = "record:" + hashlib.sha256(raw).hexdigest()
            matches.append(
                {"version": _metadata_version(info), "record": record, "fingerprint": fingerprint, "at": info}
            )
        elif rank == 0 and editable is None:
            fingerprint = "editable:" + hashlib.sha256(raw).hexdigest()
            editable = {"version": _metadata_version(info), "record": None, "fingerprint": fingerprint}
    if len(matches) > 1:
        warnings.append("several installs claim %s: %s" % (directory, ", ".join(m["at"] for m in matches)))
    return matches[-1] if matches else editable


def _read_record(raw, folder_name):
    prefix = folder_name + "/"
    record = {}
    for row in csv.reader(raw.decode("utf-8", "surrogateescape").splitlines()):
        if len(row) >= 2 and row[0].startswith(prefix) and row[1].startswith("sha256="):
            encoded = row[1][len("sha256=") :]
            digest = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
            record[row[0][len(prefix) :]] = digest.hex()
    return record


def _metadata_version(info):
    try:
        with open(os.path.join(info, "METADATA"), encoding="utf-8", errors="replace") as source:
            for line in source:
                if line.lower().startswith("version:"):
                    return line.split(":", 1)[1].strip()
                if not line.strip():
                    break
    except OSError:
        pass  # a damaged dist-info still names its version in the folder's name
    return os.path.basename(info)[: -len(".dist-info")].partition("-")[2] or "0+unknown"


def _version_file(directory):
    for name in ("version.py", "_version.py", "__init__.py"):
        try:
            with open(os.path.join(directory, name), encoding="utf-8", errors="replace") as source:
                match = re.search(
                    r"^(?:__version__|version)\s*=\s*[\"']([^\"']+)[\"']", source.read(65536), re.MULTILINE
                )
        except OSError:
            continue
        if match:
            return match.group(1)
    return "0+unknown"


def _git(directory, *words):
    """Output of a git command in `directory`, or None where there is no git or no work tree.

    `safe.directory=*` because root often works on a user's tree; only reading commands are run.
    """
    output = _git_bytes(directory, *words)
    return output.decode("utf-8", "surrogateescape").strip() if output is not None else None


def _git_bytes(directory, *words):
    environment = dict(os.environ, GIT_OPTIONAL_LOCKS="0", LC_ALL="C", GIT_CONFIG_COUNT="1")
    environment.update(GIT_CONFIG_KEY_0="safe.directory", GIT_CONFIG_VALUE_0="*")
    try:
        done = subprocess.run(
            ["git", "-C", directory] + list(words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_GIT_DEADLINE_S,
            check=False,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def differing_from_origin(package, hashes):
    """Relative paths that are not as they came: changed, added or missing; sorted.

    Args:
        package: What `locate` found.
        hashes: {relative path: sha256 hex} of every file found, bytecode left out.
    """
    if package.record is not None:
        wanted = {path: digest for path, digest in package.record.items() if not is_bytecode(path)}
        return sorted(path for path in set(wanted) | set(hashes) if wanted.get(path) != hashes.get(path))
    if package.git_root is not None:
        listing = _git_bytes(package.directory, "status", "--porcelain", "-z", "--no-renames", "-uall", "--", ".")
        if listing is not None:
            return _from_status(listing, package)
    return []


def _from_status(listing, package):
    prefix = os.path.relpath(package.directory, os.path.realpath(package.git_root))
    prefix = "" if prefix == "." else prefix + "/"
    paths = []
    for entry in listing.split(b"\0"):
        path = entry[3:].decode("utf-8", "surrogateescape")
        if path.startswith(prefix) and not is_bytecode(path):
            paths.append(path[len(prefix) :])
    return sorted(paths)


def is_bytecode(path):
    """Whether a relative path is compiled bytecode, which comes and goes."""
    return path.endswith((".pyc", ".pyo")) or "__pycache__" in path.split("/")


def as_json(package):
    """The package for a result: everything but the hashes."""
    return json.loads(
        json.dumps(
            {
                "name": package.name,
                "directory": package.directory,
                "version": package.version,
                "kind": package.kind,
                "fingerprint": package.fingerprint,
            }
        )
    )
