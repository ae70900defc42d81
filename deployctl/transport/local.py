"""`connection: local`: the same agent on this machine, without SSH."""

import os
import selectors
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Self

from deployctl.errors import LinkLost, Unreachable
from deployctl.transport.base import Completed

_TAIL_BYTES = 65536


class LocalTransport:
    """Runs commands on this machine, in their own session, as a host would.

    Args:
        env: The whole environment of the commands; this process's own by default.
        home: What a leading `~` in argv[0] means; HOME of `env` by default.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._env = dict(env) if env is not None else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def open(self, argv: Sequence[str]) -> "LocalChannel":
        """Start a command; see `Transport.open`."""
        env = self._env if self._env is not None else dict(os.environ)
        first = argv[0]
        if first.startswith("~/"):
            first = env.get("HOME", os.path.expanduser("~")) + first[1:]
        try:
            process = subprocess.Popen(
                [first, *argv[1:]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=env,
                cwd=env.get("HOME") or None,
                start_new_session=True,
            )
        except OSError as error:
            if error.filename == env.get("HOME"):
                raise Unreachable(f"cannot start a command in {error.filename}: {error.strerror}") from error
            return _NeverStarted(f"{first}: {error.strerror}\n".encode())  # type: ignore[return-value]
        return LocalChannel(process)


class LocalChannel:
    """A child process as a `Channel`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._stdin: IO[bytes] = process.stdin
        self._stdout: IO[bytes] = process.stdout
        self._stderr: IO[bytes] = process.stderr
        self._tail = bytearray()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stdout, selectors.EVENT_READ)
        self._sending = threading.Lock()
        self._drain = threading.Thread(target=self._drain_stderr, daemon=True)
        self._drain.start()

    def _drain_stderr(self) -> None:
        while chunk := os.read(self._stderr.fileno(), 65536):
            self._tail += chunk
            del self._tail[:-_TAIL_BYTES]

    def send(self, data: bytes) -> None:
        """See `Channel.send`."""
        with self._sending:
            try:
                self._stdin.write(data)
                self._stdin.flush()
            except (BrokenPipeError, ValueError):
                return  # it closed its stdin; what it has to say comes over stdout and its status

    def send_eof(self) -> None:
        """See `Channel.send_eof`."""
        with self._sending:
            try:
                self._stdin.close()
            except BrokenPipeError:
                return

    def receive(self, timeout_s: float) -> bytes | None:
        """See `Channel.receive`."""
        if not self._selector.select(timeout_s):
            return None
        return os.read(self._stdout.fileno(), 262144)

    def finish(self, timeout_s: float) -> Completed:
        """See `Channel.finish`."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise LinkLost(f"the command (pid {self._process.pid}) closed its output but did not end") from None
        self._drain.join(1.0)
        name = signal.Signals(-status).name.removeprefix("SIG") if status < 0 else None
        return Completed(None if name else status, name, bytes(self._tail))

    def close(self) -> None:
        """See `Channel.close`."""
        self.send_eof()
        self._selector.close()
        self._stdout.close()
        # The command may go on for a while (it finishes or undoes what it began): reap it when it ends.
        threading.Thread(target=self._reap, daemon=True).start()

    def _reap(self) -> None:
        self._process.wait()
        self._drain.join()
        self._stderr.close()


class _NeverStarted:
    """A command that could not be started: what a shell reports with status 127."""

    def __init__(self, stderr: bytes) -> None:
        self._stderr = stderr

    def send(self, data: bytes) -> None:
        """Nothing reads it."""

    def send_eof(self) -> None:
        """Nothing reads it."""

    def receive(self, timeout_s: float) -> bytes | None:  # noqa: ARG002
        """No output."""
        return b""

    def finish(self, timeout_s: float) -> Completed:  # noqa: ARG002
        """Status 127."""
        return Completed(127, None, self._stderr)

    def close(self) -> None:
        """Nothing is open."""
