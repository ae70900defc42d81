"""One host on this machine, asked in this process: real processes, signals, sockets and files; only the wire is memory."""

import contextlib
import os
import signal
import socket
import sys
import textwrap
import threading
import time
from pathlib import Path

from deployctl.agent import attempts, lock, processes
from deployctl.agent.main import Context, perform
from deployctl.agent.state import State
from deployctl.remote.bundle import source_of

DEADLINE_S = 30.0


def until(condition, what="the condition", deadline_s=DEADLINE_S):
    """Wait for a condition; its first true value."""
    finish = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < finish, f"{what} did not come about within {deadline_s} s"
        time.sleep(0.01)
    return value


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Wire:
    """Events in memory, controls from the test."""

    def __init__(self):
        self.events = []
        self.cancelled = threading.Event()
        self.gone = threading.Event()
        self.blobs = {}
        self.controls = []
        self.on_event = lambda _event: None

    def event(self, kind, /, **fields):
        event = dict(fields, event=kind)
        self.events.append(event)
        self.on_event(event)

    def await_control(self, words, deadline_s):
        finish = time.monotonic() + deadline_s
        while time.monotonic() < finish and not self.cancelled.is_set():
            for control in self.controls:
                if control["control"] in words:
                    self.controls.remove(control)
                    return control
            time.sleep(0.005)
        return None

    def named(self, kind):
        return [event for event in self.events if event["event"] == kind]


class LaunchHost:
    """A state directory, a log folder and an interpreter with the stand-in engine."""

    def __init__(self, root: Path, python: Path):
        self.root = root
        self.python = python
        self.port = free_port()
        self.home = root / "home"
        self.home.mkdir()
        self.host = {
            "name": "box",
            "package": "sglang",
            "python": str(python),
            "state_dir": str(root / "state dir"),
            "log_dir": str(root / "logs"),
            "shm_dir": str(root / "shm"),
            "gpu": {"devices": str(root / "dev" / "nvidia[0-9]*"), "clean": "ours"},
            "limits": {"term_grace_s": 3, "kill_patience_s": 5, "gpu_memory_s": 3, "burst_s": 10},
        }
        (root / "shm").mkdir()
        self.state = State(self.host["state_dir"])
        self.wire = Wire()
        self.background = []

    # -- asking ------------------------------------------------------------------------------------------------------

    def context(self, operation, wire=None, **args):
        self.wire = wire or Wire()
        request = {
            "op": operation,
            "host": self.host,
            "args": args,
            "run_id": args.pop("own_run_id", "run-1"),
            "operator": args.pop("operator", "ann@example.org"),
            "command": operation,
        }
        return Context(request, self.wire, [], {"keeper": source_of("keeper")})

    def ask(self, operation, wire=None, **args):
        """Run one operation to its result."""
        result = perform(self.context(operation, wire, **args))
        assert "traceback" not in result, result["traceback"]
        return result

    def ask_behind(self, operation, wire=None, **args):
        """Run one operation in a thread; returns its Behind."""
        behind = Behind(self, operation, args, wire)
        self.background.append(behind)
        return behind

    def launch_args(self, tag="a", *extra, argv=None, mode=None, load_s=0.4, **changes):
        """Arguments of a launch of the stand-in, as the client makes them."""
        if argv is None:
            argv = ["{python}", "-m", "sglang.launch_server", "--model-path", "/m", "--port", str(self.port)]
            argv += ["--standin-load", str(load_s), *(["--standin-mode", mode] if mode else []), *extra]
        url = f"http://127.0.0.1:{self.port}/health"
        args = {
            "profile": "eagle3",
            "argv": argv,
            "env": {},
            "cwd": str(self.home),
            "engine": "sglang",
            "log_tag": tag,
            "ready": {"url": url, "timeout_s": 20},
            "timeout_s": None,
            "port": self.port,
            "smoke_spec": {"prompt": "The capital of France is", "max_tokens": 16, "expect": ""},
            "smoke": True,
            "burst": None,
            "clean": None,
            "replace": False,
            "wait": True,
            "rank": 0,
            "nodes": 1,
            "watch": "ready",
        }
        args.update(changes)
        return args

    def launch(self, *words, **changes):
        wire = changes.pop("wire", None)
        return self.ask("launch", wire, **self.launch_args(*words, **changes))

    def launch_behind(self, *words, **changes):
        return self.ask_behind("launch", **self.launch_args(*words, **changes))

    def script(self, text, name="engine.py"):
        """The command line of an engine that the test writes itself; it gets the port as its first argument."""
        path = self.root / name
        path.write_text(textwrap.dedent(text))
        return [sys.executable, "-u", str(path), str(self.port)]

    # -- looking -----------------------------------------------------------------------------------------------------

    def attempt(self, number=None):
        return attempts.load(self.state, number) if number else attempts.newest(self.state)

    def server(self, number=None):
        """(pid, start) of an attempt's server."""
        run = until(lambda: (self.attempt(number) or {}).get("run"), "the keeper's record")
        return run["pid"], run["start"]

    def log(self, number=None):
        return Path(self.attempt(number)["log"])

    def marked(self):
        if not os.path.isdir(self.state.root):
            return []
        return processes.marked(lock.machine_identity(self.state) + ":")

    def rewrite(self, part, number=None, **fields):
        """Change a record of an attempt, as another machine or an earlier boot would have left it."""
        number = number or self.attempt()["attempt"]
        value = self.state.read_json("attempts", number, part + ".json") or {}
        value.update(fields)
        self.state.write_json(value, "attempts", number, part + ".json")

    def end(self):
        """End what the test started, by pid and start time, and wait for it."""
        for behind in self.background:
            behind.wire.cancelled.set()
        for behind in self.background:
            behind.thread.join(DEADLINE_S)
            assert not behind.thread.is_alive()
        finish = time.monotonic() + DEADLINE_S
        while left := self.marked():
            for process, _ in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            assert time.monotonic() < finish, left
            time.sleep(0.02)
        for attempt in attempts.listing(self.state):
            run = attempt["run"] or {}
            if run.get("keeper_pid") and run["boot_id"] == processes.boot_id():
                until(lambda run=run: not processes.alive(run["keeper_pid"], run["keeper_start"]), "the keeper's end")


class Behind:
    """An operation that runs in a thread of its own."""

    def __init__(self, host, operation, args, wire=None):
        self.wire = wire or Wire()
        context = host.context(operation, self.wire, **args)
        self.result = None
        self.thread = threading.Thread(target=self._run, args=(context,), daemon=True)
        self.thread.start()

    def _run(self, context):
        self.result = perform(context)

    def event(self, kind, **fields):
        """Wait for an event with these fields."""

        def found():
            assert self.thread.is_alive() or self._matching(kind, fields), self.result
            return self._matching(kind, fields)

        return until(found, f"event {kind} {fields}")[0]

    def _matching(self, kind, fields):
        return [e for e in self.wire.named(kind) if all(e.get(name) == value for name, value in fields.items())]

    def finish(self):
        """Its result."""
        self.thread.join(DEADLINE_S * 2)
        assert not self.thread.is_alive()
        assert "traceback" not in self.result, self.result["traceback"]
        return self.result
