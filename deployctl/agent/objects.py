"""File contents by sha256, each stored once under STATE/objects/."""

import hashlib
import os

from .failure import EXIT_NEEDS_RECOVERY, Failure
from .state import write_file


def digest(content):
    """sha256 of bytes, in hex."""
    return hashlib.sha256(content).hexdigest()


def path_of(state, sha):
    """Where a content lies."""
    return state.path("objects", sha[:2], sha)


def put(state, content, durable=True):
    """Store bytes; returns their sha256.

    Args:
        state: The state directory.
        content: Bytes.
        durable: Whether to sync it now; when False the caller syncs the file system before relying on it.

    Raises:
        Failure: No space, read-only or not permitted, naming the path.
    """
    sha = digest(content)
    path = path_of(state, sha)
    if _is_there(path, content):
        return sha
    write_file(path, content, 0o600, durable)
    return sha


def _is_there(path, content):
    """Whether it is stored, and whole: a power cut may have left a file of the right name and size with other bytes."""
    try:
        with open(path, "rb") as source:
            return source.read() == content
    except OSError:
        return False


def read(state, sha):
    """The bytes of a content, proven by its hash.

    Raises:
        Failure: Missing or damaged (exit 8).
    """
    path = path_of(state, sha)
    try:
        with open(path, "rb") as source:
            content = source.read()
    except OSError as error:
        raise Failure(
            "stored content %s cannot be read: %s" % (path, error.strerror),
            kind="state-damaged",
            hint="reinstall the package with pip and push with --adopt",
            exit_code=EXIT_NEEDS_RECOVERY,
        ) from error
    if digest(content) != sha:
        raise Failure(
            "stored content %s is damaged" % path,
            kind="state-damaged",
            hint="check the disk; reinstall the package with pip and push with --adopt",
            exit_code=EXIT_NEEDS_RECOVERY,
        )
    return content


def sync_file_system(path):
    """Flush everything written to the file system of `path`: one call instead of thousands of fsyncs."""
    handle = os.open(path, os.O_RDONLY)
    try:
        import ctypes

        if ctypes.CDLL(None, use_errno=True).syncfs(handle) == 0:
            return
    except (AttributeError, OSError, ImportError):
        pass  # no syncfs on this platform: the line below is slower and does as much
    finally:
        os.close(handle)
    os.sync()
