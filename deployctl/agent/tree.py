"""The live package as hashes, quickly, and writing its files so that mode, owner and links stay as they are.

Paths are relative to the package directory, `/` between parts, undecodable bytes as surrogate escapes. Bytecode and
version control folders do not belong to a tree. A symbolic link to a file counts as the file it leads to; links to
folders are not followed.
"""

import collections
import hashlib
import os
import shutil
import stat
import sys
import tempfile
import time

from .state import disk_failure, sync_folder

Entry = collections.namedtuple("Entry", "sha mode")
Entry.__doc__ = "One file: sha256 in hex, permission bits."

_SKIPPED_FOLDERS = {"__pycache__", ".git", ".hg", ".svn"}
# A file changed within this time before the cache was written may change again unseen (clock granularity): hash anew.
_RACY_NS = 50 * 1000 * 1000


def walk(directory):
    """Yield (relative path, os.stat_result, absolute path) of every file of the tree, links to files followed."""
    todo = [("", directory)]
    while todo:
        prefix, folder = todo.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                name = entry.name
                if entry.is_dir(follow_symlinks=False):
                    if name not in _SKIPPED_FOLDERS:
                        todo.append((prefix + name + "/", entry.path))
                    continue
                if name.endswith((".pyc", ".pyo")) or name.startswith(".deployctl-"):
                    continue
                try:
                    found = entry.stat()
                except OSError:
                    continue  # a dangling link is no file
                if stat.S_ISREG(found.st_mode):
                    yield prefix + name, found, entry.path


def scan(directory, index=None):
    """Hash a tree, reading only files whose stat differs from the cache.

    Args:
        directory: Absolute path.
        index: Stat cache of an earlier scan (`{"at": ns, "files": {path: [size, mtime, ctime, inode, sha]}}`), or None.

    Returns:
        (entries, index): {path: Entry}, and the new cache.
    """
    known = (index or {}).get("files", {})
    horizon = (index or {}).get("at", 0) - _RACY_NS
    began = time.time_ns()
    entries, files = {}, {}
    for path, found, absolute in walk(directory):
        key = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
        old = known.get(path)
        if old is not None and old[:4] == key and found.st_ctime_ns < horizon and found.st_mtime_ns < horizon:
            sha = old[4]
        else:
            sha = hash_file(absolute)
        entries[path] = Entry(sha, stat.S_IMODE(found.st_mode))
        files[path] = key + [sha]
    return entries, {"at": began, "files": files}


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


class Writer:
    """Replaces files of a tree: all new contents are written beside their targets first, then renamed one by one.

    Args:
        directory: The package directory.
        checkpoint: Called between any two changes; tests stop the process there.
    """

    def __init__(self, directory, checkpoint=lambda: None):
        self._directory = directory
        self._checkpoint = checkpoint
        self._ready = []  # (temporary, target)
        self._doomed = []
        self._made = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for temporary, _ in self._ready:
            try:
                os.unlink(temporary)
            except OSError:
                pass  # renamed already, or on a disk that now refuses everything
        # Folders made for files that were never put there; those in use refuse.
        for folder in reversed(self._made):
            try:
                os.rmdir(folder)
            except OSError:
                break

    def prepare(self, path, content, mode):
        """Write new content beside its target. Raises Failure (disk full, read-only...) with the target untouched."""
        target = os.path.realpath(os.path.join(self._directory, path))
        folder = os.path.dirname(target)
        temporary = None
        try:
            self._make(folder)
            old = os.stat(target) if os.path.exists(target) else None
            handle, temporary = tempfile.mkstemp(prefix=".deployctl-", dir=folder)
            self._ready.append((temporary, target))
            with os.fdopen(handle, "wb") as out:
                out.write(content)
                out.flush()
                _keep_particulars(temporary, target, old, mode)
                os.fsync(out.fileno())
        except OSError as error:
            raise disk_failure(error, target) from error
        _other_second(temporary, old)

    def remove(self, path):
        """Have a file removed."""
        self._doomed.append(os.path.join(self._directory, path))

    def _make(self, folder):
        missing = []
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for new in reversed(missing):
            os.mkdir(new, 0o755)
            owner = os.stat(os.path.dirname(new))
            if os.geteuid() == 0:
                os.chown(new, owner.st_uid, owner.st_gid)
            self._made.append(new)

    def swap(self):
        """Rename and remove everything prepared; then drop stale bytecode and make it durable."""
        folders = set()
        try:
            while self._ready:
                self._checkpoint()
                temporary, target = self._ready[0]
                os.replace(temporary, target)
                self._ready.pop(0)
                drop_bytecode(target)
                folders.add(os.path.dirname(target))
            for target in self._doomed:
                self._checkpoint()
                if os.path.lexists(target):
                    os.unlink(target)
                drop_bytecode(target)
                folders.add(_drop_empty(os.path.dirname(target), self._directory))
            self._checkpoint()
            # A folder that lost its first file here may have lost its last, and have gone, since.
            for folder in sorted(filter(os.path.isdir, folders)):
                sync_folder(folder)
        except OSError as error:
            raise disk_failure(error, error.filename or self._directory) from error
        self._made = []


def _keep_particulars(temporary, target, old, mode):
    """Owner, mode and extended attributes of the file that is replaced; of its folder where it is new."""
    if old is None:
        owner, bits = os.stat(os.path.dirname(target)), mode
    else:
        owner, bits = old, stat.S_IMODE(old.st_mode) if mode is None else mode
        try:
            shutil.copystat(target, temporary)
        except OSError:
            pass  # attributes that this file system cannot carry
    if os.geteuid() == 0:
        os.chown(temporary, owner.st_uid, owner.st_gid)
    elif owner.st_gid != os.stat(temporary).st_gid:
        try:
            os.chown(temporary, -1, owner.st_gid)
        except OSError:
            pass  # not a member of that group: the file becomes ours, as with any editor
    os.chmod(temporary, 0o644 if bits is None else bits)
    now = time.time()
    os.utime(temporary, (now, now))


def _other_second(temporary, old):
    """Bytecode compares whole seconds and size only: a replaced file must differ in its second."""
    if old is not None and int(os.stat(temporary).st_mtime) == int(old.st_mtime):
        moved = int(old.st_mtime) + 1
        os.utime(temporary, (moved, moved))


def drop_bytecode(source):
    """Remove the compiled forms of a source file, whichever interpreter wrote them."""
    if not source.endswith(".py"):
        return
    folder, name = os.path.split(source)
    stem = name[:-3]
    caches = [os.path.join(folder, "__pycache__")]
    prefix = getattr(sys, "pycache_prefix", None)
    if prefix:
        caches.append(os.path.join(prefix, folder.lstrip("/")))
    for cache in caches:
        try:
            names = os.listdir(cache)
        except OSError:
            continue  # nothing was ever compiled there
        for entry in names:
            if entry.startswith(stem + ".") and entry.endswith((".pyc", ".pyo")):
                _unlink_quietly(os.path.join(cache, entry))
    _unlink_quietly(source + "c")


def _unlink_quietly(path):
    try:
        os.unlink(path)
    except OSError:
        pass  # not there, or another's: then its recorded second differs from the new file's


def _drop_empty(folder, root):
    """Remove folders that became empty, up to the root; returns the one that remains."""
    while folder != root and folder.startswith(root):
        try:
            cache = os.path.join(folder, "__pycache__")
            if os.listdir(folder) == ["__pycache__"] and not os.listdir(cache):
                os.rmdir(cache)
            os.rmdir(folder)
        except OSError:
            break
        folder = os.path.dirname(folder)
    return folder


def sweep(directory, since):
    """Remove what a killed Writer left: temporary files, and empty folders made since `since` (seconds)."""
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            if name.startswith(".deployctl-"):
                _unlink_quietly(os.path.join(folder, name))
        if folder != directory and os.stat(folder).st_ctime >= since - 1 and not os.listdir(folder):
            _drop_empty(folder, directory)


def copy_tree(source, target, entries, content_of):
    """Make a complete staged copy.

    Args:
        source, target: Directories; the target is created.
        entries: {path: (Entry, live)}: what the copy shall hold; `live` tells that the live file has that content.
        content_of: Callable sha → bytes for the others.
    """
    made = set()
    for path, (entry, live) in entries.items():
        destination = os.path.join(target, path)
        folder = os.path.dirname(destination)
        if folder not in made:
            os.makedirs(folder, exist_ok=True)
            made.add(folder)
        try:
            if live:
                shutil.copyfile(os.path.join(source, path), destination)
            else:
                with open(destination, "wb") as out:
                    out.write(content_of(entry.sha))
            os.chmod(destination, entry.mode | 0o200)
        except OSError as error:
            raise disk_failure(error, destination) from error
