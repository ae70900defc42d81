"""A command on an SSH channel: its streams pumped so that neither can stop the other, a broken link named."""

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from deployctl.errors import LinkLost
from deployctl.transport.base import Completed

if TYPE_CHECKING:
    import paramiko

_TAIL_BYTES = 65536
_SEND_BLOCK = 32768


class SshChannel:
    """A command on an SSH channel; its stderr is drained in the background, so neither stream can stop the other."""

    def __init__(self, channel: "paramiko.Channel", host: str, *, dead_peer_s: float) -> None:
        self._channel = channel
        self._host = host
        self._dead_peer_s = dead_peer_s
        self._tail = bytearray()
        self._sending = threading.Lock()
        self._drain = threading.Thread(target=self._drain_stderr, daemon=True)
        self._drain.start()

    def _drain_stderr(self) -> None:
        while True:
            try:
                chunk = self._channel.recv_stderr(65536)
            except OSError:
                return
            if not chunk:
                return
            self._tail += chunk
            del self._tail[:-_TAIL_BYTES]

    def send(self, data: bytes) -> None:
        """See `Channel.send`."""
        with self._sending, self._broken_link_named():
            view = memoryview(data)
            self._channel.settimeout(self._dead_peer_s)
            while view:
                try:
                    sent = self._channel.send(bytes(view[:_SEND_BLOCK]))
                except TimeoutError:
                    raise LinkLost(f"{self._host} takes no more data") from None
                except OSError:
                    if self._channel.closed or self._channel.eof_received:
                        return  # the command ended; its status and output tell why
                    raise
                view = view[sent:]

    def send_eof(self) -> None:
        """See `Channel.send_eof`."""
        with contextlib.suppress(OSError, EOFError):
            self._channel.shutdown_write()

    def receive(self, timeout_s: float) -> bytes | None:
        """See `Channel.receive`."""
        with self._broken_link_named():
            self._channel.settimeout(timeout_s)
            try:
                chunk = self._channel.recv(262144)
            except TimeoutError:
                return None
            if not chunk and not self._alive() and self._channel.exit_status == -1:
                raise LinkLost(f"the connection to {self._host} broke")
            return chunk

    def _alive(self) -> bool:
        transport = self._channel.get_transport()
        return bool(transport is not None and transport.is_active())

    def finish(self, timeout_s: float) -> Completed:
        """See `Channel.finish`."""
        if not self._channel.status_event.wait(timeout_s):
            raise LinkLost(f"the command on {self._host} closed its output but did not end")
        status = self._channel.exit_status
        if status == -1 and not self._alive():
            raise LinkLost(f"the connection to {self._host} broke")
        self._drain.join(1.0)
        if status == -1:
            # paramiko keeps no exit signal: a channel that ends without a status ended by one.
            return Completed(None, "unknown", bytes(self._tail))
        return Completed(status, None, bytes(self._tail))

    def close(self) -> None:
        """See `Channel.close`."""
        with contextlib.suppress(OSError, EOFError):
            self._channel.close()

    @contextlib.contextmanager
    def _broken_link_named(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise
        except (OSError, EOFError) as error:
            raise LinkLost(f"the connection to {self._host} broke: {error or type(error).__name__}") from error
