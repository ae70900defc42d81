"""Playbook steps that are no deploy step: a program of the user on the host, and a file put there."""

import os
import stat

from . import audit, script
from .failure import EXIT_USAGE, Failure
from .state import write_file


def run(context):
    """Run argv; its output is streamed, its exit status decides."""
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
    if os.path.isdir(context.state.root):
        audit.record(context, result)
    return result


def copy(context):
    """Write a file atomically: the blob `content` to `target` with `mode`."""
    target = os.path.expanduser(context.args["target"])
    if not os.path.isabs(target):
        target = os.path.join(os.path.expanduser("~"), target)
    if os.path.isdir(target):
        raise Failure("%s is a folder" % target, kind="usage", hint="name the file", exit_code=EXIT_USAGE)
    mode = context.args.get("mode")
    if mode is None:
        mode = stat.S_IMODE(os.stat(target).st_mode) if os.path.exists(target) else 0o644
    write_file(os.path.realpath(target), context.wire.blobs["content"], mode)
    result = {"status": "ok", "target": target, "bytes": len(context.wire.blobs["content"])}
    if os.path.isdir(context.state.root):
        audit.record(context, result)
    return result
