"""The live package as hashes, quickly.

Paths are relative to the package directory, `/` between parts, undecodable bytes as surrogate escapes. Bytecode and
version control folders do not belong to a tree. A symbolic link to a file counts as the file it leads to; links to
folders are not followed.
"""

import collections
import hashlib
import os
import stat
import time

from .failure import Failure

Entry = collections.namedtuple("Entry", "sha mode")
Entry.__doc__ = "One file: sha256 in hex, permission bits."

TEMPORARY_PREFIX = ".deployctl-"
SKIPPED_FOLDERS = {"__pycache__", ".git", ".hg", ".svn"}
# A file changed within this time before the cache was written may change again unseen (clock granularity): hash anew.
_RACY_NS = 50 * 1000 * 1000


def is_bytecode(name):
    """Whether a file name is that of compiled Python, which comes and goes."""
    return name.endswith((".pyc", ".pyo"))


def walk(directory, folders=None, odd=None):
    """Yield (relative path, os.stat_result, absolute path) of every file of the tree, links to files followed.

    Args:
        directory: Absolute path.
        folders: A list that receives the relative paths of all folders, parents first, or None.
        odd: A list that receives what is not a plain file or folder with one name, bytecode included, or None.

    Raises:
        Failure: A folder that may not be read.
    """
    todo = [("", directory)]
    while todo:
        prefix, folder = todo.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError as error:
            if prefix and isinstance(error, FileNotFoundError):
                continue  # removed meanwhile
            raise _unreadable(error, folder) from error
        for entry in entries:
            name = entry.name
            if entry.is_dir(follow_symlinks=False):
                if name not in SKIPPED_FOLDERS:
                    todo.append((prefix + name + "/", entry.path))
                    if folders is not None:
                        folders.append(prefix + name)
                elif odd is not None:
                    odd.append(prefix + name)
                continue
            if odd is not None:
                about = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1 or is_bytecode(name):
                    odd.append(prefix + name)
            if is_bytecode(name) or name.startswith(TEMPORARY_PREFIX):
                continue
            try:
                found = entry.stat()
            except OSError:
                continue  # a dangling link is no file
            if stat.S_ISREG(found.st_mode):
                yield prefix + name, found, entry.path


def strange(directory):
    """What no release can hold: links to folders or to nothing, sockets, pipes; {relative path: link text or None}."""
    odd: list = []
    for _ in walk(directory, odd=odd):
        pass
    found = {}
    for path in sorted(odd):
        full = os.path.join(directory, path)
        if not _is_ordinary(full):
            found[path] = os.readlink(full) if os.path.islink(full) else None
    return found


def _is_ordinary(path):
    return os.path.isfile(path) or is_bytecode(path) or is_folder(path)


def is_folder(path):
    """Whether a path is a folder itself, no link to one."""
    return os.path.isdir(path) and not os.path.islink(path)


def scan(directory, index=None, odd=None):
    """Hash a tree, reading only files whose stat differs from the cache.

    Args:
        directory: Absolute path.
        index: Stat cache of an earlier scan, or None: `{"at": ns, "files": {path: [size, mtime, ctime, inode, sha]},
            "folders": [path]}`.
        odd: As for `walk`.

    Returns:
        (entries, index): {path: Entry}, and the new cache.

    Raises:
        Failure: A file or folder that may not be read.
    """
    known, at = (index or {}).get("files", {}), (index or {}).get("at", 0)
    if not isinstance(known, dict) or not isinstance(at, int):
        known, at = {}, 0  # a damaged cache is none
    horizon = at - _RACY_NS
    began = time.time_ns()
    entries, files = {}, {}
    folders: list = []
    for path, found, absolute in walk(directory, folders, odd):
        key = key_of(found)
        old = known.get(path)
        cached = old[4] if isinstance(old, list) and len(old) == 5 and old[:4] == key else None
        if cached is not None and found.st_ctime_ns < horizon and found.st_mtime_ns < horizon:
            sha = cached
        else:
            try:
                sha = hash_file(absolute)
            except FileNotFoundError:
                continue  # removed meanwhile
            except OSError as error:
                raise _unreadable(error, absolute) from error
        entries[path] = Entry(sha, stat.S_IMODE(found.st_mode))
        files[path] = key + [sha]
    return entries, {"at": began, "files": files, "folders": folders}


def key_of(found):
    """What a stat cache compares of an os.stat_result."""
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _unreadable(error, path):
    if isinstance(error, PermissionError):
        return Failure(
            "permission denied: %s cannot be read" % path,
            kind="permission",
            hint="set `user:` of this host to the owner of the package",
        )
    return Failure("%s cannot be read: %s" % (path, error.strerror), kind="io", hint="look at %s" % path)


def hash_file(path):
    """sha256 of a file in hex."""
    hasher = hashlib.sha256()
    with open(path, "rb") as source:
        for chunk in iter(lambda: source.read(1 << 20), b""):
            hasher.update(chunk)
    return hasher.hexdigest()


def differences(expected, found):
    """Paths whose content differs between two {path: Entry}, sorted; missing on one side counts."""
    return sorted(
        path
        for path in set(expected) | set(found)
        if (expected[path].sha if path in expected else None) != (found[path].sha if path in found else None)
    )
