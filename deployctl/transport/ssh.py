"""SSH through paramiko: one connection to a host, one channel a command."""

import contextlib
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from deployctl.errors import LinkLost
from deployctl.transport import ssh_config
from deployctl.transport.ssh_channel import SshChannel
from deployctl.transport.ssh_connect import Crowded, Target, Transient, connect

if TYPE_CHECKING:
    import paramiko

T = TypeVar("T")
_LOADING = threading.Lock()
# A server that limits unauthenticated connections (MaxStartups) resets some of many that come at once: those retries
# cost nothing and may go on for longer than retries of a host that is not there.
_CROWDED_TRIES = 12


def command_line(argv: Sequence[str]) -> str:
    """The text that every login shell turns back into `argv`.

    A leading `~/` of the first word is left for the shell. Single quotes keep everything else in sh, bash, dash, zsh
    and csh; fish alone reads backslashes inside them, and csh `!`: words with these are refused, since the agent's
    own command needs neither and everything else travels in the request.
    """
    words = list(argv)
    for word in words:
        if "\\" in word or "!" in word or "\n" in word:
            raise ValueError(f"not safe in every login shell: {word!r}")
    first = words[0]
    head = f"~/{shlex.quote(first[2:])}" if first.startswith("~/") else shlex.quote(first)
    return " ".join([head, *(shlex.quote(word) for word in words[1:])])


class SshTransport:
    """A connection to one host. Entering it connects, with retries; see `Transport`."""

    def __init__(self, target: Target, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._target = target
        self._sleep = sleep
        self._client: paramiko.SSHClient | None = None
        # Connections to jump hosts, to be closed after the one that goes through them.
        self._way: list[paramiko.SSHClient] = []

    def __enter__(self) -> Self:
        from tenacity import RetryCallState, Retrying, retry_if_exception_type, wait_exponential_jitter

        def enough(state: RetryCallState) -> bool:
            error = state.outcome.exception() if state.outcome else None
            limit = _CROWDED_TRIES if isinstance(error, Crowded) else self._target.tries
            return state.attempt_number >= limit

        # The resolution by ssh costs a process, and paramiko's import as much time: side by side.
        options = _Background(lambda: ssh_config.resolve(self._target.address, self._target.user, self._target.port))
        early = _Background(lambda: _early_socket(options.result(), self._target))
        _load_paramiko()
        retrying = Retrying(
            retry=retry_if_exception_type((Crowded, Transient)),
            stop=enough,
            wait=wait_exponential_jitter(multiplier=0.3, max=4.0, jitter=0.7),
            sleep=self._sleep,
            reraise=True,
        )
        resolved = options.result()
        sockets = iter([early.result])

        def once() -> None:
            self._client = connect(self._target, resolved, next(sockets, None), self._way)

        retrying(once)
        return self

    def __exit__(self, *_: object) -> None:
        for client in [self._client, *reversed(self._way)]:
            if client is not None:
                with contextlib.suppress(Exception):
                    client.close()
        self._client, self._way = None, []

    def open(self, argv: Sequence[str]) -> SshChannel:
        """Start a command; see `Transport.open`."""
        import paramiko

        try:
            assert self._client is not None
            transport = self._client.get_transport()
            assert transport is not None
            channel = transport.open_session(timeout=self._target.dead_peer_s)
            _exec_without_reply(transport, channel, command_line(argv))
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise LinkLost(f"no session on {self._target.name}: {error or type(error).__name__}") from error
        return SshChannel(channel, self._target.name, dead_peer_s=self._target.dead_peer_s)


def _load_paramiko() -> None:
    """Import paramiko without Invoke, which it wants for `Match exec` of its own config reader alone.

    That reader refuses `Match` here anyway (see `ssh_config`), and the import is a third of the whole: 60 of 150 ms.
    """
    with _LOADING:
        if "paramiko" not in sys.modules and "invoke" not in sys.modules:
            sys.modules["invoke"] = None  # type: ignore[assignment]
            try:
                import paramiko  # noqa: F401
            finally:
                del sys.modules["invoke"]


class _Background(Generic[T]):
    """A value computed in a thread; its exception is raised where it is asked for."""

    def __init__(self, compute: Callable[[], T]) -> None:
        self._value: T
        self._error: BaseException | None = None
        self._compute = compute
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._compute()
        except BaseException as error:
            self._error = error

    def result(self) -> T:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value


def _early_socket(options: ssh_config.SshOptions, target: Target) -> socket.socket | None:
    """The TCP connection, made while paramiko is being imported; None where a proxy makes it."""
    if target.jump or options.proxy_jump or options.proxy_command:
        return None
    return socket.create_connection((options.hostname, options.port), timeout=target.connect_timeout_s)


def _exec_without_reply(transport: "paramiko.Transport", channel: "paramiko.Channel", command: str) -> None:
    """Ask for a command and do not wait for "granted": its input can follow at once, which saves a round trip.

    A refusal shows itself by a channel that ends without output and status. RFC 4254, section 6.5; paramiko offers the
    waiting form alone, hence its message by hand.
    """
    import paramiko
    from paramiko.common import cMSG_CHANNEL_REQUEST

    message = paramiko.Message()
    message.add_byte(cMSG_CHANNEL_REQUEST)
    message.add_int(channel.remote_chanid)
    message.add_string("exec")
    message.add_boolean(False)
    message.add_string(command)
    transport._send_user_message(message)  # type: ignore[attr-defined]  # noqa: SLF001
