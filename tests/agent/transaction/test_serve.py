"""The agent's frame around every operation: signals, stdout, the verdict, and faults of any kind turned into one."""

import json
import os
import signal
import threading
import time

import pytest
from support import MemoryWire, perform, threshold

from deployctl.agent import main
from deployctl.agent.failure import Failure

SIGNALS = (signal.SIGHUP, signal.SIGPIPE, signal.SIGTERM, signal.SIGINT)


class Left(BaseException):
    """The process would have ended here."""


@pytest.fixture
def serve(near, monkeypatch):
    """Serve one request in this process; returns (what came out on stdout, what came out on stderr, exit status)."""

    def leave(status):
        raise Left(status)

    def run(operation, act=None, **args):
        request = {"op": operation, "args": args, "host": near.host}
        (out_end, out), (err_end, err), (in_end, hold) = os.pipe(), os.pipe(), os.pipe()
        saved = [(number, os.dup(number)) for number in (1, 2)]
        handlers = [(number, signal.getsignal(number)) for number in SIGNALS]
        if act is not None:
            monkeypatch.setitem(main.OPERATIONS, operation, "main:ping")
            monkeypatch.setattr(main, "ping", act)
        monkeypatch.setattr(os, "_exit", leave)
        stdin = os.fdopen(in_end, "rb")
        threads = set(threading.enumerate())
        try:
            for number, end in ((1, out), (2, err)):
                os.dup2(end, number)
                os.close(end)
            with pytest.raises(Left) as left:
                main.serve({"nonce": "n"}, request, stdin, [], {})
        finally:
            for number, copy in saved:
                os.dup2(copy, number)
                os.close(copy)
            for number, handler in handlers:
                signal.signal(number, handler)
            os.close(hold)
            for thread in set(threading.enumerate()) - threads:
                thread.join(10)
            stdin.close()
        texts = []
        for end in (out_end, err_end):
            with os.fdopen(end, "rb") as source:
                texts.append(source.read())
        return (*texts, left.value.args[0])

    return run


def frames(out: bytes) -> list[dict]:
    assert all(line.startswith(b"@n ") for line in out.splitlines())
    return [json.loads(line[3:]) for line in out.splitlines()]


def test_hello_then_the_verdict(serve):
    """The protocol's number, our pid and version first; one verdict last; then the process ends with 0."""
    out, _, status = serve("ping")
    hello, verdict = frames(out)
    assert (main.PROTOCOL, os.getpid()) == (hello["protocol"], hello["pid"])
    assert ("verdict", "ok", 0, None) == (
        verdict["event"],
        *(verdict["result"][key] for key in ("status", "exit", "error")),
    )
    assert 0 == status


def test_nothing_but_frames_reaches_stdout(serve):
    """What an operation, or its children, print goes to stderr."""

    def prints(context):
        os.write(1, b"noise from below\n")
        os.system("echo noise from a child")
        return {"status": "ok"}

    out, err, _ = serve("noisy", prints)
    assert ["hello", "verdict"] == [frame["event"] for frame in frames(out)]
    assert b"noise from below\nnoise from a child\n" == err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_cancel(serve, number):
    """SIGTERM and Ctrl-C at the host are the client's cancel: the operation undoes what it has begun."""

    def waits(context):
        os.kill(os.getpid(), number)
        return {"status": "cancelled" if context.wire.cancelled.wait(10) else "deaf"}

    assert "cancelled" == frames(serve("waits", waits)[0])[-1]["result"]["status"]


def test_a_signal_ends_the_wait_for_the_word(serve):
    """SIGTERM while a push waits for the other hosts: not after five minutes, but now."""

    def waits(context):
        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGTERM]).start()
        return {"status": "deaf" if context.wire.await_control(("commit",), 300) else "cancelled"}

    began = time.monotonic()
    assert "cancelled" == frames(serve("waits", waits)[0])[-1]["result"]["status"]
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGPIPE])
def test_a_lost_terminal_does_not_end_the_agent(serve, number):
    """It goes on to finish or undo; the wire notices by itself that nobody is there."""

    def goes_on(context):
        os.kill(os.getpid(), number)
        return {"status": "through", "cancelled": context.wire.cancelled.is_set()}

    result = frames(serve("goes-on", goes_on)[0])[-1]["result"]
    assert ("through", False) == (result["status"], result["cancelled"])


def test_faults_become_results(near, monkeypatch):
    """A Failure keeps its words; anything else is kind `internal` with its traceback; an unknown operation too."""

    def act(error):
        def raises(context):
            raise error

        monkeypatch.setattr(main, "ping", raises)
        return perform(near, "ping")

    failed = act(Failure("because", kind="k", hint="h", exit_code=9, status="drift", more=1))
    assert ("drift", 9, 1, {"kind": "k", "message": "because", "hint": "h"}) == tuple(
        failed[key] for key in ("status", "exit", "more", "error")
    )
    for error in (KeyError("x"), KeyboardInterrupt("x"), SystemExit("x")):
        result = act(error)
        assert ("failed", 1, "internal") == (result["status"], result["exit"], result["error"]["kind"])
        assert type(error).__name__ in result["error"]["message"]
        assert "in raises" in result["traceback"]
    assert "internal" == perform(near, "no-such-operation")["error"]["kind"]


def test_every_operation_is_there():
    """The table's functions exist."""
    import importlib

    for target in main.OPERATIONS.values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module("deployctl.agent." + module), function)), target


def test_defaults_of_a_bare_request(monkeypatch, tmp_path):
    """Paths below the home, bounds as given or their defaults."""
    monkeypatch.setenv("HOME", str(tmp_path))
    context = main.Context({"op": "status"}, MemoryWire(), [], {})
    assert (str(tmp_path / ".deployctl"), str(tmp_path / "deployctl-logs")) == (context.state.root, context.log_dir)
    assert ("unknown", "", "status", {}) == (context.operator, context.run_id, context.command, context.args)
    assert 7 == context.limit("burst_s", 7)
    context.host = {"limits": {"burst_s": 3}}
    assert 3 == context.limit("burst_s", 7)


def test_a_pause_ends_with_the_client(near):
    """The tests' own hook: it waits at its boundary until the client has gone, and the push is undone."""
    paused = threading.Event()

    def hook(wire, event):
        if event["event"] == "paused":
            paused.set()
            threading.Timer(0.2, wire.cancelled.set).start()

    near.on_event = hook
    patch, blobs = near.patch("a/v1", threshold(5))
    began = time.monotonic()
    result = perform(near, "push", blobs, transaction="x", patch=patch, pause_at=1)
    assert paused.is_set()
    assert time.monotonic() - began >= 0.2
    assert 130 == result["exit"]
