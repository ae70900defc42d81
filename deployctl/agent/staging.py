"""The staged copy of the package that patch scripts work on.

A copy of thousands of files takes a third of a second, and the next push needs nearly the same one: what a script has
left is kept as STATE/mirror, and brought up to date by what differs. Nothing is taken on trust: the mirror is read
through a stat cache as the live tree is, and one that holds anything but plain files of its own is thrown away.
"""

import json
import os
import shutil

from . import objects, tree
from .failure import Failure
from .state import disk_failure

_EMPTY: dict = {"at": 0, "files": {}, "folders": []}


class Staging:
    """Staged copies of one transaction.

    Args:
        state: The state directory.
        name: The package's name, which is that of the staged folder.
    """

    def __init__(self, state, name):
        self._state = state
        self._name = name
        self._index = dict(_EMPTY)
        self.path = ""

    def make(self, root, source, entries, live, content_of):
        """Make a staged copy below `root`, from the last one where there is one.

        Args:
            root: A folder to make.
            source: The live package directory.
            entries: {path: Entry} that the copy shall hold.
            live: {path: Entry} of the live tree: what is the same there is copied from there.
            content_of: Callable sha → bytes for the rest.

        Raises:
            Failure: No space, or not permitted.
        """
        staged = os.path.join(root, self._name)
        try:
            os.makedirs(root, mode=0o700)
            known = self._take(staged)
            for path in [path for path in known if path not in entries]:
                os.unlink(os.path.join(staged, path))
            _drop_folders(staged, self._index["folders"], entries)
            made: set = set()
            for path, entry in entries.items():
                if known.get(path) != _writable(entry):
                    same = path in live and live[path].sha == entry.sha
                    content = _read(os.path.join(source, path)) if same else content_of(entry.sha)
                    if objects.digest(content) != entry.sha:
                        raise _changing(path)
                    found = _write(os.path.join(staged, path), content, _writable(entry).mode, made)
                    self._index["files"][path] = tree.key_of(found) + [entry.sha]
                    self._index["at"] = max(self._index["at"], found.st_ctime_ns)
        except OSError as error:
            raise disk_failure(error, error.filename or staged) from error
        self.path = staged

    def read(self):
        """{path: Entry} of the staged copy as it is now."""
        found, self._index = tree.scan(self.path, self._index)
        return found

    def keep(self):
        """Keep the staged copy for the next push; where that fails the next push takes longer."""
        if not self.path:
            return
        mirror = self._state.path("mirror")
        shutil.rmtree(mirror, ignore_errors=True)
        try:
            os.mkdir(mirror, 0o700)
            with open(os.path.join(mirror, "index.json"), "w", encoding="ascii") as out:
                out.write(json.dumps(self._index))
            os.rename(self.path, os.path.join(mirror, self._name))
        except OSError:
            shutil.rmtree(mirror, ignore_errors=True)
        self.path = ""

    def drop(self):
        """Forget the staged copy: a script that failed may still have something running in it."""
        self.path = ""

    def _take(self, staged):
        """Move the last copy to `staged`; {path: Entry} of what it holds, nothing where there is none to be had."""
        if not self.path:
            self.path = self._state.path("mirror", self._name)
            try:
                self._index = self._state.read_json("mirror", "index.json") or {}
            except Failure:
                self._index = {}
        taken, self.path = self.path, ""
        odd: list = []
        try:
            os.rename(taken, staged)
            known, self._index = tree.scan(staged, self._index, odd)
        except (OSError, Failure):
            known = {}
        if odd or not known:
            shutil.rmtree(staged, ignore_errors=True)
            os.mkdir(staged, 0o700)
            known, self._index = {}, dict(_EMPTY, files={})
        return known


def _changing(path):
    return Failure(
        "somebody else writes to the package while it is being copied: %s" % path,
        kind="changed-meanwhile",
        hint="let them finish (or end that process), then try again",
    )


def _writable(entry):
    """Scripts may write to the copies of files that are read-only."""
    return entry._replace(mode=entry.mode | 0o200)


def _drop_folders(staged, folders, entries):
    """Folders that hold no file of the tree are not there: a script may want to make them."""
    needed = set()
    for path in entries:
        folder = os.path.dirname(path)
        while folder and folder not in needed:
            needed.add(folder)
            folder = os.path.dirname(folder)
    for folder in folders:
        if folder not in needed:
            shutil.rmtree(os.path.join(staged, folder), ignore_errors=True)


def _read(path):
    with open(path, "rb", buffering=0) as source:
        return source.read()


def _write(path, content, mode, made):
    folder = os.path.dirname(path)
    if folder not in made:
        os.makedirs(folder, exist_ok=True)
        made.add(folder)
    if os.path.lexists(path):
        os.unlink(path)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(handle, view) :]
        os.fchmod(handle, mode)
        return os.fstat(handle)
    finally:
        os.close(handle)
