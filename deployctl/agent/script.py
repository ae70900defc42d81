"""Runs a program of the user on the host: bounded in time and output, ended with its whole process group."""

import codecs
import os
import selectors
import signal
import subprocess
import time

from .failure import Cancelled, Failure

EVENT_BYTES = 200 * 1024
TAIL_BYTES = 16 * 1024
# How late a cancel or a deadline may be noticed; output and the program's end are noticed at once.
_TICK_S = 0.05
_TERM_GRACE_S = 3.0
_KILL_PATIENCE_S = 10.0
_DRAIN_S = 0.5


def run(context, argv, cwd, env, timeout_s, label):
    """Run `argv` to its end, its output streamed as `output` events.

    Args:
        context: Of the operation; `wire.cancelled` ends the program.
        argv, cwd, env: The program, its directory, its whole environment.
        timeout_s: Deadline in seconds.
        label: How messages call it.

    Returns:
        (status, tail): exit status (negative: the number of the signal that ended it), last 16 KiB of its output.

    Raises:
        Failure: It could not be started (kind `cannot-run`), ran past its deadline (`timeout`), or survived SIGKILL
            (`will-not-end`).
        Cancelled: The client asked to stop or went away.
    """
    output = Output(context.wire)
    process = start(argv, cwd, env, label)
    try:
        follow(context, process, {process.stdout.fileno(): output.feed}, timeout_s, label)
    except Failure as failure:
        failure.fields.setdefault("output", output.tail())
        raise
    finally:
        process.stdout.close()
        output.close()
    return process.returncode, output.tail()


def start(argv, cwd, env, label, pass_fds=()):
    """Start a program in its own session, stdin empty, stdout and stderr in one pipe (`process.stdout`).

    Raises:
        Failure: It could not be started (kind `cannot-run`).
    """
    try:
        return subprocess.Popen(
            argv,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=pass_fds,
            bufsize=0,
        )
    except OSError as error:
        # Popen names the directory when that is what is missing, and the program otherwise.
        raise Failure(
            "%s could not be started: %s: %s" % (label, error.filename or argv[0], error.strerror), kind="cannot-run"
        ) from error
    except ValueError as error:
        raise Failure("%s could not be started: %s" % (label, error), kind="cannot-run") from error


def follow(context, process, sinks, timeout_s, label, done=lambda: False):
    """Feed a program's output to its readers until it ends, and leave nothing of its process group behind.

    Args:
        context: Of the operation; `wire.cancelled` ends the program.
        process: From `start`.
        sinks: {file descriptor to read: callable that takes bytes}.
        timeout_s: Deadline in seconds.
        label: How messages call it.
        done: Callable that tells that all is known before the program has ended.

    Raises:
        Failure: Past its deadline (`timeout`), or not even SIGKILL ended it (`will-not-end`).
        Cancelled: The client asked to stop or went away.
    """
    end = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for handle in sinks:
            selector.register(handle, selectors.EVENT_READ)
        try:
            while process.poll() is None and not done():
                if selector.get_map():
                    _pump(selector, sinks, _TICK_S)
                else:
                    _wait(process, _TICK_S)
                if context.wire.cancelled.is_set():
                    raise Cancelled("%s was cancelled" % label)
                if time.monotonic() > end:
                    raise Failure(
                        "%s did not end within %g s" % (label, timeout_s),
                        kind="timeout",
                        hint="look for a wait in it, or raise the timeout where it is set",
                    )
            # What the program itself wrote lies in the pipe by now. A background process that it left behind may hold
            # the pipe open for ever: nobody waits for that.
            drained_by = time.monotonic() + _DRAIN_S
            while time.monotonic() < drained_by and selector.get_map() and _pump(selector, sinks, 0):
                pass
        finally:
            end_group(process)


def _pump(selector, sinks, timeout_s):
    """Take what is there, waiting up to `timeout_s`; whether anything came."""
    ready = selector.select(timeout_s)
    for key, _ in ready:
        chunk = os.read(key.fd, 65536)
        if chunk:
            sinks[key.fd](chunk)
        else:
            selector.unregister(key.fd)
    return bool(ready)


def _wait(process, timeout_s):
    try:
        process.wait(timeout_s)
        return True
    except subprocess.TimeoutExpired:
        return False


def end_group(process):
    """End what is left of a program's process group: SIGTERM, a short grace, SIGKILL.

    Raises:
        Failure: The program survives even SIGKILL, as one that hangs in a dead network file system does.
    """
    for number, patience_s in ((signal.SIGTERM, _TERM_GRACE_S), (signal.SIGKILL, _KILL_PATIENCE_S)):
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            break
        end = time.monotonic() + patience_s
        _wait(process, patience_s)
        # Its children get what is left of the grace; after SIGKILL the kernel needs no help.
        while number == signal.SIGTERM and _group_lives(process.pid) and time.monotonic() < end:
            time.sleep(0.01)
    if not _wait(process, _KILL_PATIENCE_S):
        raise Failure(
            "process %d does not end, not even by SIGKILL" % process.pid,
            kind="will-not-end",
            hint="it hangs in the kernel: look at `ps -o stat,wchan -p %d` on the host" % process.pid,
        )


def _group_lives(group):
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def describe(status):
    """`exit status 3` or `signal SIGKILL`."""
    if status >= 0:
        return "exit status %d" % status
    try:
        return "signal %s" % signal.Signals(-status).name
    except ValueError:
        return "signal %d" % -status


class Output:
    """A program's output: events up to a bound, and the tail.

    Args:
        wire: Where the events go, or None to keep the tail alone.
    """

    def __init__(self, wire=None):
        self._wire = wire
        self._tail = bytearray()
        self._room = EVENT_BYTES if wire else 0
        # A character may be cut in two between two reads.
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def feed(self, chunk):
        """Take what the program printed."""
        self._tail += chunk
        del self._tail[:-TAIL_BYTES]
        if self._room <= 0:
            return
        shown, full = chunk[: self._room], len(chunk) >= self._room
        self._room -= len(chunk)
        text = self._decoder.decode(shown, full)
        if text:
            self._wire.event("output", text=text)
        if full:
            self._wire.event("output", text="\n[... more output; its end is in the result]\n")

    def close(self):
        """Show the bytes that were waiting for the rest of their character."""
        text = self._decoder.decode(b"", True)
        if text:
            self._wire.event("output", text=text)

    def tail(self):
        """The last 16 KiB as text, from the first whole character on."""
        start = 0
        if len(self._tail) == TAIL_BYTES:
            while start < 3 and self._tail[start] & 0xC0 == 0x80:
                start += 1
        return self._tail[start:].decode("utf-8", "backslashreplace")
