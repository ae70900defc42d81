"""The seam: what a workflow may ask of a connection to a host. Nothing here knows about SSH."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self


@dataclass(frozen=True, slots=True)
class Completed:
    """A command that ran to its end, whatever its status.

    `status` is None when it ended by a signal, which is then in `signal` (without the prefix SIG). `stderr_tail` holds
    the last 64 KiB of its standard error.
    """

    status: int | None
    signal: str | None
    stderr_tail: bytes


class Channel(Protocol):
    """One command running on the host, with its three streams.

    All methods raise `LinkLost` when the connection breaks.
    """

    def send(self, data: bytes) -> None:
        """Write to the command's stdin, whatever the size; silently dropped once the command closed it."""

    def send_eof(self) -> None:
        """Close the command's stdin."""

    def receive(self, timeout_s: float) -> bytes | None:
        """The next bytes of its stdout; b"" at its end; None when nothing came within `timeout_s` seconds."""

    def finish(self, timeout_s: float) -> Completed:
        """Wait for the end, after stdout has ended."""

    def close(self) -> None:
        """Let go: the command gets end-of-file on its stdin and is not killed."""


class Transport(Protocol):
    """A connection to one host, made by entering it as a context manager; constructing connects nothing.

    Entering raises `Unreachable`, `AuthenticationError` or `HostKeyError`, after the retries that its policy allows.
    """

    def __enter__(self) -> Self:
        """Connect."""

    def __exit__(self, *_: object) -> None:
        """Disconnect."""

    def open(self, argv: Sequence[str]) -> Channel:
        """Start a command. `argv[0]` may begin with `~/`; everything else is passed on byte for byte."""
