"""Who did what on this host with which result: one JSON line each, append only."""

import json
import os
import time

from .failure import Failure


def record(context, result):
    """Append a line for a mutating operation; a full disk must not turn a done deed into a failure."""
    line = {
        "at": time.time(),
        "operator": context.operator,
        "operation": context.operation,
        "command": context.command,
        "run_id": context.run_id,
        "status": result.get("status"),
        "exit": result.get("exit", 0),
    }
    for key in ("release", "attempt", "transaction", "log_tag"):
        if result.get(key) is not None:
            line[key] = result[key]
    if result.get("error"):
        line["error"] = result["error"]["message"][:500]
    try:
        _append(context.state.path("audit.jsonl"), (json.dumps(line) + "\n").encode("ascii"))
    except OSError as error:
        context.wire.event("warning", text="audit line not written: %s" % error)


def _append(path, line):
    """Append a line, on a line of its own also where an earlier one was torn by a full disk or a power cut."""
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            line = b"\n" + line
        while line:  # a disk that is nearly full takes a part, and refuses the rest
            line = line[os.write(handle, line) :]
    finally:
        os.close(handle)


def audit_operation(context):
    """The last `lines` lines (default 50), oldest first."""
    wanted = context.args.get("lines") or 50
    try:
        with open(context.state.path("audit.jsonl"), encoding="utf-8", errors="replace") as source:
            lines = source.readlines()[-wanted:]
    except FileNotFoundError:
        lines = []
    except OSError as error:
        raise Failure("the audit log cannot be read: %s" % error, kind="io") from error
    entries = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # a line torn by a power cut
        if isinstance(entry, dict):
            entries.append(entry)
    return {"status": "ok", "entries": entries}
