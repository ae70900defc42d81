"""Entry of the agent on the host: sets the process up, runs one operation, sends its verdict."""

import importlib
import os
import signal
import sys
import threading
import traceback

from .failure import Failure
from .state import State
from .wire import Wire

PROTOCOL = 1

# operation -> "module:function". Each takes a Context and returns the host's result: a dict with `status`, and where
# it is not 0, `exit` and `error`. The client sends only the modules that the operation imports.
OPERATIONS = {
    "ping": "main:ping",
    "push": "push:push",
    "rollback": "push:rollback",
    "outcome": "push:outcome",
    "history": "push:history",
    "status": "status:status",
    "launch": "launch:launch",
    "wait": "watch:wait",
    "smoke": "smoke:smoke_operation",
    "stop": "stop:stop",
    "clean": "gpu:clean",
    "logs": "logs:logs",
    "lock": "lock:lock_operation",
    "audit": "audit:audit_operation",
    "bench": "bench:bench",
    "dossier": "dossier:dossier",
    "doctor": "doctor:doctor",
    "run": "command:run",
    "copy": "command:copy",
}


def one_line(text):
    """Words of a user's that are shown in lists of one line each: a line break in them would forge another entry."""
    return " ".join((text or "").split())


class Context:
    """What an operation works with.

    Attributes:
        args: The operation's own arguments (JSON object).
        host: The resolved host of hosts.yaml: name, package, state_dir, log_dir, gpu, limits.
        wire: Events out, control lines and blobs in.
        state: The state directory.
        python: The interpreter that runs this, as hosts.yaml names it: the one that serves.
        server_path: sys.path as the server would see it (without the current directory).
        operator, run_id, command: Who asks, one id for all hosts of a command, and the command line in words.
        sources: The agent's own modules as text (the keeper is written to disk from it).
    """

    def __init__(self, request, wire, server_path, sources):
        self.operation = request["op"]
        self.args = request.get("args") or {}
        self.host = request.get("host") or {}
        self.operator = one_line(request.get("operator")) or "unknown"
        self.run_id = request.get("run_id") or ""
        self.command = one_line(request.get("command")) or self.operation
        self.wire = wire
        self.sources = sources
        self.server_path = server_path
        self.python = sys.executable
        self.state = State(os.path.expanduser(self.host.get("state_dir") or "~/.deployctl"))
        self.log_dir = os.path.expanduser(self.host.get("log_dir") or "~/deployctl-logs")

    def limit(self, name, default):
        """A bound of hosts.yaml's `limits` in seconds (or a count)."""
        return (self.host.get("limits") or {}).get(name, default)


def serve(header, request, stdin, server_path, sources):
    """Run one request and send its verdict.

    Returns:
        The process's exit status: 0 when a verdict was sent, whatever it says.
    """
    for name in ("SIGHUP", "SIGPIPE"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    # Nothing but frames may reach stdout: descriptor 1 becomes stderr for all that follows, children included.
    stdout = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    wire = Wire(stdin, stdout, header["nonce"], header.get("blobs") or ())
    for name in ("SIGTERM", "SIGINT"):
        signal.signal(getattr(signal, name), lambda *_: wire.cancelled.set())
    wire.event("hello", protocol=PROTOCOL, pid=os.getpid(), python=sys.version.split()[0])
    wire.verdict(perform(Context(request, wire, server_path, sources)))
    # Threads blocked on stdin must not keep the process: leave without joining them.
    sys.stderr.flush()
    stdout.close()
    os._exit(0)


def perform(context):
    """Run the operation and turn whatever happens into a result."""
    try:
        module, _, function = OPERATIONS[context.operation].partition(":")
        run = getattr(importlib.import_module(__package__ + "." + module), function)
        result = run(context)
    except Failure as failure:
        return failure.as_result()
    except BaseException as error:
        lines = traceback.format_exc()
        hint = "run again with --debug and report the traceback"
        message = "%s: %s" % (type(error).__name__, error)
        return Failure(message, kind="internal", hint=hint, traceback=lines).as_result()
    result.setdefault("exit", 0)
    result.setdefault("error", None)
    return result


def ping(context):
    """Answer with what the interpreter is; the smallest operation there is."""
    return {
        "status": "ok",
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "threads": threading.active_count(),
    }
