"""Where things lie in the host's state directory, and how a small file is written so that it survives a crash.

STATE/                    0700
  machine                 which machine and package this state belongs to
  lock  hold.json         kernel lock with its holder's particulars; a manual hold
  journal.json            the open transaction, if any
  counters.json           highest attempt number ever given
  current.json            the release the tree is at, and what became of the latest transactions
  releases/<n>.json       a release: stack of patches, and the sha256 of every file that differs from base
  bases/<n>.json          sha256 and mode of every file of the pristine package; a new one when it is installed anew
  index.json              stat cache of the live tree
  mirror/                 the last staged copy, to begin the next from
  objects/<aa>/<sha256>   contents, once each
  attempts/<n>/           one launch: spec.json keeper.py run.json exit.json verdict.json
  attempts/<n>/bench/<b>/ what a bench of it measured
  staging/<tx>/           staged copies; removed when the transaction ends
  displaced/<tx>/         hand-made edits that --force moved out of the way
  audit.jsonl             who did what with which result
"""

import errno
import json
import os
import tempfile

from .failure import EXIT_NEEDS_RECOVERY, Failure


class State:
    """Paths of one host's state directory.

    Args:
        root: The directory, `~` expanded by the caller.
    """

    def __init__(self, root):
        self.root = root

    def path(self, *parts):
        """A path below the state directory."""
        return os.path.join(self.root, *[str(part) for part in parts])

    def create(self):
        """Make the directory with mode 0700. Raises Failure naming the path when that cannot be done."""
        try:
            os.makedirs(self.root, mode=0o700, exist_ok=True)
            if os.stat(self.root).st_mode & 0o077 and os.stat(self.root).st_uid == os.geteuid():
                os.chmod(self.root, 0o700)
        except OSError as error:
            raise disk_failure(error, self.root) from error

    def read_json(self, *parts):
        """The JSON object of a state file, or None where there is no such file.

        Raises:
            Failure: The file is there but cannot be read, or is no JSON object (kind `state-damaged`, exit 8).
        """
        path = self.path(*parts)
        try:
            with open(path, encoding="utf-8") as source:
                found = json.load(source)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise Failure(
                "state file %s cannot be read: %s" % (path, error.strerror),
                kind="state-unreadable",
                hint="check the owner and mode of %s, or set another state_dir" % self.root,
                exit_code=EXIT_NEEDS_RECOVERY,
            ) from error
        except ValueError as error:
            raise self.damaged(str(error), *parts) from error
        if not isinstance(found, dict):
            raise self.damaged("it is no JSON object", *parts)
        return found

    def damaged(self, reason, *parts):
        """The Failure for a state file that does not hold what it should."""
        return Failure(
            "state file %s is damaged: %s" % (self.path(*parts), reason),
            kind="state-damaged",
            hint="reinstall the package with pip, then on the host: mv '%s' '%s.damaged'; the next push begins anew"
            % (self.root, self.root),
            exit_code=EXIT_NEEDS_RECOVERY,
        )

    def write_json(self, value, *parts):
        """Write a state file atomically and durably."""
        write_file(self.path(*parts), (json.dumps(value, sort_keys=True) + "\n").encode("ascii"), 0o600)

    def next_number(self, counter):
        """Give out the next number of a counter (`attempt`); a number is never given twice."""
        counters = self.read_json("counters.json") or {}
        counters[counter] = counters.get(counter, 0) + 1
        self.write_json(counters, "counters.json")
        return counters[counter]


def write_file(path, content, mode=0o644, durable=True):
    """Write `content` (bytes) to `path` by a temporary file and a rename, the folder made if missing.

    `durable` has both synced before it returns; without, a power cut may take the file.

    Raises:
        Failure: No space, read-only, or not permitted; names the path. The old content is untouched then.
    """
    folder = os.path.dirname(path)
    temporary = None
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".deployctl-", dir=folder)
        with os.fdopen(handle, "wb") as out:
            out.write(content)
            if durable:
                out.flush()
                os.fsync(out.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
        temporary = None
        if durable:
            sync_folder(folder)
    except OSError as error:
        raise disk_failure(error, path) from error
    finally:
        if temporary is not None:
            try:
                os.unlink(temporary)
            except OSError:
                pass  # the disk that refused the write may refuse this too


def sync_folder(folder):
    """Make renames in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        pass  # some network file systems cannot sync a folder; the rename itself is atomic there
    finally:
        os.close(handle)


def disk_failure(error, path):
    """An OSError while writing, as a Failure that names the path and the reason in the user's words."""
    reasons = {
        errno.ENOSPC: ("disk-full", "no space left on %s", "free some space there (df -h %s)"),
        errno.EDQUOT: ("disk-full", "disk quota exceeded on %s", "free some space there (quota; df -h %s)"),
        errno.EROFS: ("read-only", "read-only file system: %s", "remount it writable, or set another path (%s)"),
        errno.EEXIST: ("not-a-folder", "a file is in the place of a folder: %s", "move it, or set another path (%s)"),
        errno.ENOTDIR: ("not-a-folder", "a file is in the place of a folder: %s", "move it, or set another path (%s)"),
        errno.EACCES: ("permission", "permission denied: %s", "check the owner and mode of %s"),
        errno.EPERM: ("permission", "operation not permitted: %s", "check owner, mode and attributes of %s"),
    }
    kind, message, hint = reasons.get(error.errno, ("io", "cannot write %s: " + str(error), "look at %s"))
    return Failure(message % path, kind=kind, hint=hint % (os.path.dirname(path) or path))
