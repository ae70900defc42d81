"""Runs a program of the user on the host: bounded in time and output, ended with its whole process group."""

import os
import select
import signal
import subprocess
import time

from .failure import Cancelled, Failure

EVENT_BYTES = 200 * 1024
TAIL_BYTES = 16 * 1024
_TERM_GRACE_S = 3.0
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
        Failure: It could not be started (kind `cannot-run`) or ran past its deadline (kind `timeout`).
        Cancelled: The client asked to stop or went away.
    """
    read_end, write_end = os.pipe()
    try:
        process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=write_end,
            stderr=write_end,
            start_new_session=True,
        )
    except OSError as error:
        os.close(read_end)
        raise Failure(
            "%s could not be started: %s: %s" % (label, argv[0], error.strerror), kind="cannot-run"
        ) from error
    finally:
        os.close(write_end)
    output = _Output(context.wire, read_end)
    end = time.monotonic() + timeout_s
    try:
        while process.poll() is None:
            output.pump(0.05)
            if context.wire.cancelled.is_set():
                raise Cancelled("%s was cancelled" % label, output=output.tail())
            if time.monotonic() > end:
                raise Failure(
                    "%s did not end within %g s" % (label, timeout_s),
                    kind="timeout",
                    hint="look for a wait in it, or raise the timeout where it is set",
                    output=output.tail(),
                )
        # A child that left a background process behind holds the pipe open: take what is there, do not wait for more.
        drained_by = time.monotonic() + _DRAIN_S
        while not output.ended and time.monotonic() < drained_by:
            if not output.pump(0.01):
                break
    finally:
        end_group(process)
        output.close()
    return process.returncode, output.tail()


def end_group(process):
    """End what is left of a program's process group: SIGTERM, a short grace, SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            break
        if number == signal.SIGTERM:
            end = time.monotonic() + _TERM_GRACE_S
            while process.poll() is None and time.monotonic() < end:
                time.sleep(0.01)
            if process.returncode is not None and not _group_lives(process.pid):
                break
    process.wait()


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


class _Output:
    """Collects a pipe: events up to a bound, and the tail."""

    def __init__(self, wire, handle):
        self._wire = wire
        self._handle = handle
        self._tail = bytearray()
        self._sent = 0
        self.ended = False

    def pump(self, timeout_s):
        """Take what is there, waiting up to `timeout_s`; whether anything came."""
        if self.ended:
            time.sleep(timeout_s)
            return False
        if not select.select([self._handle], [], [], timeout_s)[0]:
            return False
        chunk = os.read(self._handle, 65536)
        if not chunk:
            self.ended = True
            return False
        self._tail += chunk
        del self._tail[:-TAIL_BYTES]
        if self._sent < EVENT_BYTES:
            self._wire.event("output", text=chunk[: EVENT_BYTES - self._sent].decode("utf-8", "backslashreplace"))
            self._sent += len(chunk)
            if self._sent >= EVENT_BYTES:
                self._wire.event("output", text="\n[... more output; its end is in the result]\n")
        return True

    def tail(self):
        return self._tail.decode("utf-8", "backslashreplace")

    def close(self):
        os.close(self._handle)
