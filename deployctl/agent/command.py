"""Playbook steps that are no deploy step: a program of the user on the host, and a file put there."""

import os
import stat

from . import audit, script
from .failure import EXIT_USAGE, Failure
from .state import disk_failure, write_file


def run(context):
    """Run argv; its output is streamed, its exit status decides."""
    try:
        result = _run(context)
    except Failure as failure:
        _record(context, failure.as_result())
        raise
    _record(context, result)
    return result


def _record(context, result):
    """A line in the audit log, on hosts that have one."""
    if os.path.isdir(context.state.root):
        audit.record(context, result)


def _run(context):
    args = context.args
    argv = [word.replace("{python}", context.python) for word in args["argv"]]
    if argv[0].startswith("~/"):
        argv[0] = os.path.expanduser(argv[0])
    environment = dict(os.environ)
    environment.update(args.get("env") or {})
    cwd = os.path.expanduser(args.get("cwd") or "~")
    status, tail = script.run(context, argv, cwd, environment, args.get("timeout_s") or 600.0, argv[0])
    result = {"status": "ok" if status == 0 else "failed", "exit_status": status, "output": tail}
    if status != 0:
        result["exit"] = 1
        result["error"] = {
            "kind": "run-failed",
            "message": "%s ended with %s" % (argv[0], script.describe(status)),
            "hint": "its output stands above",
        }
    return result


def copy(context):
    """Write a file atomically: the blob `content` to `target` with `mode`; one that is there keeps owner and mode.

    Raises:
        Failure: The target is a folder or a device (exit 2), or cannot be written; what was there is untouched then.
    """
    wanted = context.args["target"]
    target = os.path.join(os.path.expanduser("~"), os.path.expanduser(wanted))
    if os.path.isdir(target) or wanted.endswith("/"):
        raise Failure("%s is a folder" % target, kind="usage", hint="name the file", exit_code=EXIT_USAGE)
    real = os.path.realpath(target)
    try:
        before = os.stat(real)
    except OSError:
        before = None  # not there yet; what else may be wrong the write will tell
    if before is not None and not stat.S_ISREG(before.st_mode):
        raise Failure("%s is no regular file" % target, kind="usage", hint="name a file", exit_code=EXIT_USAGE)
    mode = context.args.get("mode")
    if mode is None:
        mode = stat.S_IMODE(before.st_mode) if before is not None else 0o644
    content = context.wire.blobs["content"]
    try:
        # Readable by whom the user's umask says: these are no secrets of ours.
        os.makedirs(os.path.dirname(real), exist_ok=True)
        write_file(real, content, mode)
        if before is not None and (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
            _give_to(real, before, mode)
    except OSError as error:
        raise disk_failure(error, target) from error
    result = {"status": "ok", "target": target, "bytes": len(content)}
    _record(context, result)
    return result


def _give_to(path, before, mode):
    """Give a file to its former owner; only root can."""
    try:
        os.chown(path, before.st_uid, before.st_gid)
        os.chmod(path, mode)  # a change of owner takes set-user-id bits away
    except PermissionError:
        pass  # it is written, and stays ours: the folder's owner may replace files in it
