"""Writing files of the live package so that mode, owner and links stay, and no old bytecode runs in their place."""

import errno
import os
import shutil
import stat
import sys
import tempfile
import time

from .state import disk_failure, sync_folder
from .tree import SKIPPED_FOLDERS, TEMPORARY_PREFIX, is_bytecode, walk


class Writer:
    """Replaces files of a tree: all new contents are written beside their targets first, then renamed one by one.

    Args:
        directory: The package directory.
        mark: A word in the names of its temporary files, by which `sweep` knows them.
        kept_folders: Relative paths of folders that stay even when they become empty.
        checkpoint: Called between any two changes; tests stop the process there.
    """

    def __init__(self, directory, mark, kept_folders=(), checkpoint=lambda: None):
        self._directory = directory
        self._prefix = TEMPORARY_PREFIX + mark + "-"
        self._kept = {os.path.join(directory, folder) for folder in kept_folders} | {directory}
        self._checkpoint = checkpoint
        self._ready = []  # (temporary, target)
        self._doomed = []
        self._made = []
        self._renamed_in = set()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for temporary, _ in self._ready:
            _unlink_quietly(temporary)
        # Folders made for files that were never put there; those in use refuse.
        for folder in reversed(self._made):
            try:
                os.rmdir(folder)
            except OSError:
                break

    def prepare(self, path, content, mode):
        """Write new content beside its target.

        Args:
            path: Relative path.
            content: Bytes.
            mode: Permission bits, or None to keep those of the file that is there.

        Raises:
            Failure: Disk full, read-only, not permitted; the target is untouched.
        """
        target = os.path.realpath(os.path.join(self._directory, path))
        folder = os.path.dirname(target)
        try:
            self._make(folder)
            old = os.stat(target) if os.path.exists(target) else None
            handle, temporary = tempfile.mkstemp(prefix=self._prefix, dir=folder)
            self._ready.append((temporary, target))
            with os.fdopen(handle, "wb") as out:
                out.write(content)
                out.flush()
                _keep_particulars(temporary, target, old, mode)
                os.fsync(out.fileno())
        except OSError as error:
            raise disk_failure(error, target) from error

    def remove(self, path):
        """Have a file removed."""
        self._doomed.append(os.path.join(self._directory, path))

    def swap(self):
        """Rename and remove everything prepared, and make it durable."""
        try:
            while self._ready:
                self._checkpoint()
                self._rename()
            for target in self._doomed:
                self._checkpoint()
                self._remove(target)
            self._checkpoint()
            self._sync()
        except OSError as error:
            raise disk_failure(error, error.filename2 or error.filename or self._directory) from error
        self._made = []

    def put_back(self, wanted, doomed):
        """Restore files one at a time, for a tree that a journal protects: on a full disk every step frees its space.

        Args:
            wanted: [(relative path, callable → bytes, mode or None)].
            doomed: Relative paths to remove first.

        Raises:
            Failure: As `prepare`; what is done by then is right.
        """
        for path in doomed:
            self._checkpoint()
            self._remove(os.path.join(self._directory, path))
        for path, content_of, mode in wanted:
            self._checkpoint()
            self._clear_the_way(path)
            content = content_of()
            try:
                self.prepare(path, content, mode)
            except Exception as error:
                if not self._make_room(path, error):
                    raise
                self.prepare(path, content, mode)
            self._rename()
        self._sync()
        self._made = []

    def _make_room(self, path, error):
        """On a full disk, empty the file that is about to be replaced anyway: whether that was possible."""
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno not in (errno.ENOSPC, errno.EDQUOT):
            return False
        if self._ready:
            _unlink_quietly(self._ready.pop()[0])
        try:
            os.truncate(os.path.join(self._directory, path), 0)
        except OSError:
            return False
        return True

    def _clear_the_way(self, path):
        """A script may have put a folder where a file belongs; what was in it has been removed by now."""
        target = os.path.join(self._directory, path)
        if os.path.isdir(target) and not os.path.islink(target) and not any(True for _ in walk(target)):
            shutil.rmtree(target)

    def _make(self, folder):
        missing = []
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for new in reversed(missing):
            above = os.stat(os.path.dirname(new))
            os.mkdir(new)
            os.chmod(new, stat.S_IMODE(above.st_mode))
            _give(new, above.st_uid, above.st_gid)
            self._made.append(new)

    def _rename(self):
        temporary, target = self._ready[0]
        os.replace(temporary, target)
        self._ready.pop(0)
        drop_bytecode(target)
        self._renamed_in.add(os.path.dirname(target))

    def _remove(self, target):
        if os.path.lexists(target):
            os.unlink(target)
        drop_bytecode(target)
        self._renamed_in.add(self._drop_empty(os.path.dirname(target)))

    def _drop_empty(self, folder):
        """Remove folders that became empty; returns the first that remains."""
        while folder not in self._kept and folder.startswith(self._directory):
            try:
                if os.listdir(folder) == ["__pycache__"]:
                    shutil.rmtree(os.path.join(folder, "__pycache__"))
                os.rmdir(folder)
            except OSError:
                break
            folder = os.path.dirname(folder)
        return folder

    def _sync(self):
        for folder in sorted(self._renamed_in):
            if os.path.isdir(folder):
                sync_folder(folder)


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
    _give(temporary, -1, owner.st_gid)
    _give(temporary, owner.st_uid, -1)
    os.chmod(temporary, 0o644 if bits is None else bits)
    set_new_second(temporary, None if old is None else old.st_mtime)


def own_copies(directory, mark):
    """Give every file that has further names (hard links, as uv installs them) a copy of its own.

    A live script that opens such a file and writes would change every other installation that shares it, and no
    rollback of ours would reach those. Times stay, so bytecode stays valid.

    Args:
        directory: The package directory.
        mark: A word in the names of the temporary files, by which `sweep` knows them.

    Returns:
        How many were copied; their contents are not synced.

    Raises:
        Failure: Disk full, read-only, not permitted.
    """
    copied = 0
    for path, status, absolute in walk(directory):
        if status.st_nlink > 1:
            target = os.path.realpath(absolute)
            temporary = ""
            copied += 1
            try:
                handle, temporary = tempfile.mkstemp(prefix=TEMPORARY_PREFIX + mark + "-", dir=os.path.dirname(target))
                os.close(handle)
                shutil.copyfile(target, temporary)
                shutil.copystat(target, temporary)
                _give(temporary, status.st_uid, status.st_gid)
                os.chmod(temporary, stat.S_IMODE(status.st_mode))
                os.replace(temporary, target)
            except OSError as error:
                _unlink_quietly(temporary)
                raise disk_failure(error, os.path.join(directory, path)) from error
    return copied


def set_new_second(path, old_mtime):
    """Give a file a modification time of now, and a later second than the content it replaces.

    Bytecode is checked by whole seconds and size alone: an edit of equal size within one second would run old code.
    """
    second = time.time()
    if old_mtime is not None and int(second) <= int(old_mtime):
        second = float(int(old_mtime) + 1)
    os.utime(path, (second, second))


def sync_file(path):
    """Make a file's content durable, for one that somebody else wrote."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def drop_bytecode(source):
    """Remove the compiled forms of a source file, whichever interpreter wrote them."""
    if not source.endswith(".py"):
        return
    folder, name = os.path.split(source)
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
            if entry.startswith(name[:-3] + ".") and is_bytecode(entry):
                _unlink_quietly(os.path.join(cache, entry))
    _unlink_quietly(source + "c")


def _unlink_quietly(path):
    try:
        os.unlink(path)
    except OSError:
        pass  # not there, or another's: then its recorded second differs from the new file's


def sweep(directory, folders, mark):
    """Remove what a killed Writer left: its temporary files, and folders that are empty and not among `folders`.

    Args:
        directory: The package directory.
        folders: Relative paths of the folders that were there before.
        mark: The Writer's: temporary files outside the package, beside files that it links to, may be others'.
    """
    known = {os.path.join(directory, folder) for folder in folders} | {directory}
    found, outside = [], set()
    for folder, below, names in os.walk(directory):
        below[:] = [name for name in below if name not in SKIPPED_FOLDERS]
        found.append(folder)
        for name in names:
            path = os.path.join(folder, name)
            if name.startswith(TEMPORARY_PREFIX):
                _unlink_quietly(path)
            elif os.path.islink(path):
                outside.add(os.path.dirname(os.path.realpath(path)))
    for folder in reversed(found):
        if folder not in known and not os.listdir(folder):
            os.rmdir(folder)
    for folder in outside:
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            if name.startswith(TEMPORARY_PREFIX + mark + "-"):
                _unlink_quietly(os.path.join(folder, name))


def particulars(directory):
    """{relative path: [mode, uid, gid, link text or None]} of every file."""
    found = {}
    for path, status, absolute in walk(directory):
        link = os.readlink(absolute) if os.path.islink(absolute) else None
        found[path] = [stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, link]
    return found


def _give(path, uid, gid):
    try:
        os.chown(path, uid, gid)
    except PermissionError:
        pass  # only root may give files away: it stays ours, as with any editor


def folders_of(directory, paths):
    """{relative path: [mode, uid, gid]} of folders."""
    found = {}
    for path in paths:
        status = os.stat(os.path.join(directory, path))
        found[path] = [stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid]
    return found


def put_folders_back(directory, recorded):
    """Make the folders that are gone, in the place of whatever else a script may have put there."""
    for path in sorted(path for path in recorded if path != "."):
        full = os.path.join(directory, path)
        if not os.path.isdir(full) or os.path.islink(full):
            _make_folder(full, *recorded[path])


def put_root_back(directory, recorded):
    """Make the package's own folder (`.` of the recorded ones), which a script may have removed or renamed whole."""
    if not os.path.isdir(directory) or os.path.islink(directory):
        os.makedirs(os.path.dirname(directory), exist_ok=True)
        _make_folder(directory, *recorded.get(".", (0o755, -1, -1)))


def _make_folder(full, mode, uid, gid):
    if os.path.lexists(full):
        os.unlink(full)
    os.mkdir(full)
    _give(full, uid, gid)
    os.chmod(full, mode)


def put_links_back(directory, recorded, missing_too):
    """Make the files that were symbolic links links again; the files they lead to are not touched.

    Args:
        directory: The package directory.
        recorded: {relative path: link text, or None for what was no link}.
        missing_too: Whether links that are gone altogether are made, too.
    """
    for path, link in recorded.items():
        full = os.path.join(directory, path)
        if link is None or (os.path.islink(full) and os.readlink(full) == link):
            continue
        if not missing_too and not os.path.lexists(full):
            continue
        temporary = os.path.join(os.path.dirname(full), "%slink-%d" % (TEMPORARY_PREFIX, os.getpid()))
        _unlink_quietly(temporary)
        os.symlink(link, temporary)
        os.replace(temporary, full)


def put_particulars_back(directory, recorded):
    """Give files that are there the mode and owner they had."""
    for path, (mode, uid, gid, _) in recorded.items():
        full = os.path.join(directory, path)
        try:
            found = os.stat(full)
        except OSError:
            continue  # taken away on purpose
        if (found.st_uid, found.st_gid) != (uid, gid):
            _give(full, uid, gid)
        if stat.S_IMODE(found.st_mode) != mode:
            os.chmod(full, mode)
