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
        handle = os.open(context.state.path("audit.jsonl"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(handle, (json.dumps(line) + "\n").encode("ascii"))
        finally:
            os.close(handle)
    except OSError as error:
        context.wire.event("warning", text="audit line not written: %s" % error)


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
            entries.append(json.loads(line))
        except ValueError:
            continue  # a line torn by a power cut
    return {"status": "ok", "entries": entries}
