"""SSH through paramiko: one connection to a host, one channel a command.

paramiko alone: Fabric adds a third of a second of imports to every command and brings what is not used here (its `run`
sends input a byte every 10 ms, its connection accepts any host key); gateways and proxy commands are a few lines below.
"""

import contextlib
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar

from deployctl.errors import AuthenticationError, DeployError, LinkLost, Unreachable
from deployctl.transport import host_keys, ssh_config
from deployctl.transport.base import Completed

if TYPE_CHECKING:
    import paramiko

T = TypeVar("T")
_LOADING = threading.Lock()
_TAIL_BYTES = 65536
_KEEPALIVE_S = 15
_SEND_BLOCK = 32768
# A server that limits unauthenticated connections (MaxStartups) resets some of many that come at once: those retries
# cost nothing and may go on for longer than retries of a host that is not there.
_CROWDED_TRIES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where to connect; user, port and jump are None where nothing was written."""

    name: str
    address: str
    user: str | None = None
    port: int | None = None
    jump: str | None = None
    host_keys: Literal["strict", "accept-new"] = "strict"
    connect_timeout_s: float = 15.0
    tries: int = 3
    dead_peer_s: float = 45.0


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


class _Crowded(Unreachable):
    """The server closed the connection before it said anything: it limits connections that come at once."""


class _Transient(Unreachable):
    """Refused, reset, or timed out: worth another try."""


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
            limit = _CROWDED_TRIES if isinstance(error, _Crowded) else self._target.tries
            return state.attempt_number >= limit

        # The resolution by ssh costs a process, and paramiko's import as much time: side by side.
        options = _Background(lambda: ssh_config.resolve(self._target.address, self._target.user, self._target.port))
        early = _Background(lambda: _early_socket(options.result(), self._target))
        _load_paramiko()
        retrying = Retrying(
            retry=retry_if_exception_type((_Crowded, _Transient)),
            stop=enough,
            wait=wait_exponential_jitter(multiplier=0.3, max=4.0, jitter=0.7),
            sleep=self._sleep,
            reraise=True,
        )
        resolved = options.result()
        sockets = iter([early])

        def once() -> None:
            self._client = _connect(self._target, resolved, next(sockets, None), self._way)

        retrying(once)
        return self

    def __exit__(self, *_: object) -> None:
        for client in [self._client, *reversed(self._way)]:
            if client is not None:
                with contextlib.suppress(Exception):
                    client.close()
        self._client, self._way = None, []

    def open(self, argv: Sequence[str]) -> "SshChannel":
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
        return SshChannel(channel, self._target)


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


class _Settled(_Background[Any]):
    """A value that is there already."""

    def __init__(self, value: Any) -> None:
        super().__init__(lambda: value)


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


def _connect(
    target: Target,
    options: ssh_config.SshOptions,
    early: "_Background[Any] | None",
    way: "list[paramiko.SSHClient]",
) -> "paramiko.SSHClient":
    """One try: a connected client whose host key was checked. Connections to jump hosts are added to `way`."""
    import paramiko

    where = f"{options.user}@{host_keys.lookup_name(options.hostname, options.port)}"
    client = paramiko.SSHClient()
    # paramiko is given no known hosts of its own: every key comes to this policy.
    client.set_missing_host_key_policy(_KeyPolicy(target, options))  # type: ignore[arg-type]
    credentials, offered = _credentials(options)
    try:
        sock = early.result() if early is not None else None
        if sock is None:
            sock = _reach(target, options, way)
        client.connect(
            hostname=options.hostname,
            port=options.port,
            username=options.user,
            sock=sock,
            timeout=target.connect_timeout_s,
            banner_timeout=target.connect_timeout_s,
            auth_timeout=max(target.connect_timeout_s, 30.0),
            channel_timeout=target.dead_peer_s,
            transport_factory=_transport_class(options),
            **credentials,
        )
    except DeployError:
        client.close()
        raise
    except paramiko.PasswordRequiredException as error:
        client.close()
        raise AuthenticationError(
            f"a private key of {where} is encrypted, and there is no agent that holds it", hint="ssh-add the key"
        ) from error
    except paramiko.AuthenticationException as error:
        broke = "saw EOF" in str(error) and not _farewell(client)
        client.close()
        if broke:
            raise _broke_off(where) from error
        raise AuthenticationError(
            f"authentication failed for {where}, {offered} keys offered: {error}",
            hint=f"try: ssh -p {options.port} {options.user}@{options.hostname} true",
        ) from error
    except paramiko.SSHException as error:
        broke = "No existing session" in str(error) and not _farewell(client)
        client.close()
        if broke:
            raise _broke_off(where) from error
        raise _ssh_failure(error, where, offered, target, options) from error
    except (OSError, EOFError) as error:
        client.close()
        raise _no_connection(error, where, target) from error
    transport = client.get_transport()
    assert transport is not None
    transport.set_keepalive(_KEEPALIVE_S)
    _bound_dead_peer(transport.sock, target.dead_peer_s)
    return client


def _farewell(client: "paramiko.SSHClient") -> str:
    """What the server said when it hung up; empty where the link ended without a word."""
    return str(getattr(client.get_transport(), "farewell", ""))


def _broke_off(where: str) -> DeployError:
    return _Transient(f"the connection to {where} broke while logging in", hint="the same command again")


def _reach(target: Target, options: ssh_config.SshOptions, way: "list[paramiko.SSHClient]") -> Any:
    """The stream to a host's sshd: plain TCP, through a chain of jump hosts, or a proxy command's."""
    jump = target.jump or options.proxy_jump
    if not jump:
        if options.proxy_command:
            return _proxy(options.proxy_command)
        return socket.create_connection((options.hostname, options.port), timeout=target.connect_timeout_s)
    from deployctl.domain.inventory import parse_address

    previous: paramiko.SSHClient | None = None
    for hop in jump.split(","):
        user, address, port = parse_address(hop.strip().removeprefix("ssh://"))
        hop_target = replace(target, name=hop, address=address, user=user, port=port, jump=None)
        hop_options = ssh_config.resolve(address, user, port)
        if previous is None:
            previous = _connect(hop_target, hop_options, None, way)
        else:
            stream = _through(previous, hop_options, target)
            previous = _connect(hop_target, hop_options, _Settled(stream), way)
        way.append(previous)
    assert previous is not None
    return _through(previous, options, target)


def _proxy(command: str) -> Any:
    """A proxy command's streams; closing it ends and reaps the process, pipes included (paramiko leaves them)."""
    import paramiko

    class Proxy(paramiko.ProxyCommand):
        def close(self) -> None:
            process = self.process
            if process.poll() is None:
                process.terminate()
            process.wait(5)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

    return Proxy(command)


def _through(client: "paramiko.SSHClient", options: ssh_config.SshOptions, target: Target) -> Any:
    """A stream to another host through a connected one."""
    import paramiko

    transport = client.get_transport()
    assert transport is not None
    try:
        return transport.open_channel(
            "direct-tcpip", (options.hostname, options.port), ("127.0.0.1", 0), timeout=target.connect_timeout_s
        )
    except paramiko.ChannelException as error:
        raise _Transient(
            f"the jump host cannot reach {options.hostname}:{options.port}: {error.text}",
            hint=f"try from there: ssh -p {options.port} {options.hostname} true",
        ) from error


def _transport_class(options: ssh_config.SshOptions) -> Any:
    """A paramiko transport that asks for host keys of the types that are known for this host first."""
    import paramiko

    name = options.host_key_alias or host_keys.lookup_name(options.hostname, options.port)
    types = [entry.type for entry in host_keys.known_keys(name, options.known_hosts) if not entry.marker]

    class KnownFirst(paramiko.Transport):
        # A server that has had enough of wrong keys says so; paramiko forgets it, and a cut link looks the same then.
        farewell = ""

        def _parse_disconnect(self, m: Any) -> None:
            m.get_int()
            self.farewell = m.get_text() or "no reason given"

        @property
        def preferred_keys(self) -> Any:
            offered = super().preferred_keys
            wanted = [key for key in offered if _family(key) in types]
            return tuple(wanted) + tuple(key for key in offered if key not in wanted)

    return KnownFirst


def _family(algorithm: str) -> str:
    """The key type of a signature algorithm: rsa-sha2-512 signs with an ssh-rsa key."""
    return "ssh-rsa" if algorithm.startswith("rsa-sha2-") else algorithm


def _credentials(options: ssh_config.SshOptions) -> tuple[dict[str, Any], int]:
    """What to offer: the named keys that exist, and the agent unless IdentitiesOnly; with the number of keys."""
    files = [str(path) for path in options.identity_files if path.is_file()]
    agent_keys = 0
    allow_agent = options.identity_agent != "none" and bool(os.environ.get("SSH_AUTH_SOCK"))
    strategy: dict[str, Any] = {"allow_agent": allow_agent, "look_for_keys": False}
    if options.identities_only:
        strategy["allow_agent"] = False
    if strategy["allow_agent"]:
        with contextlib.suppress(Exception):
            import paramiko

            agent = paramiko.Agent()
            agent_keys = len(agent.get_keys())
            agent.close()
    if files:
        strategy["key_filename"] = files
    return strategy, len(files) + agent_keys


class _KeyPolicy:
    """paramiko's hook for a host key it does not know: all of them, since it is given none."""

    def __init__(self, target: Target, options: ssh_config.SshOptions) -> None:
        self._target = target
        self._options = options

    def missing_host_key(self, client: object, hostname: str, key: "paramiko.PKey") -> None:  # noqa: ARG002
        """Check against known_hosts; raises HostKeyError."""
        host_keys.check(
            hostname=self._options.hostname,
            port=self._options.port,
            alias=self._options.host_key_alias,
            key_type=key.get_name(),
            blob=key.asbytes(),
            files=self._options.known_hosts or (Path("~/.ssh/known_hosts").expanduser(),),
            policy=self._target.host_keys,
            ssh_strict=self._options.strict,
        )


def _ssh_failure(
    error: Exception, where: str, offered: int, target: Target, options: ssh_config.SshOptions
) -> DeployError:
    text = str(error)
    if "banner" in text.lower():
        return _Crowded(
            f"{where} closed the connection before its greeting: {text}",
            hint="sshd's MaxStartups limits connections at once, or that is no SSH server",
        )
    if "No existing session" in text or "Too many authentication" in text or "No authentication methods" in text:
        return AuthenticationError(
            f"authentication failed for {where}, {offered} keys offered",
            hint="name the right key: IdentityFile and `IdentitiesOnly yes` in ~/.ssh/config",
        )
    if isinstance(error.__cause__, OSError) or "Unable to connect" in text:
        return _no_connection(error.__cause__ or error, where, target)
    return _Transient(f"no connection to {where}: {text}", hint=f"try: ssh -p {options.port} {options.hostname} true")


def _no_connection(error: BaseException, where: str, target: Target) -> DeployError:
    if isinstance(error, DeployError):
        return error
    if isinstance(error, socket.gaierror):
        return Unreachable(f"no such host: {where} ({error.strerror})", hint="check `address` in hosts.yaml")
    if isinstance(error, TimeoutError):
        return _Transient(
            f"{where} does not answer within {target.connect_timeout_s:g} s",
            hint="is the machine up, the network there?",
        )
    if isinstance(error, ConnectionRefusedError):
        return _Transient(f"{where} refused the connection", hint="is sshd running there, on that port?")
    if isinstance(error, (ConnectionResetError, EOFError)):
        return _Crowded(f"{where} closed the connection", hint="sshd's MaxStartups limits connections at once")
    nested = getattr(error, "errors", None)
    if isinstance(nested, dict) and nested:
        return _no_connection(next(iter(nested.values())), where, target)
    return _Transient(f"no connection to {where}: {error}", hint="try: ssh to that host by hand")


def _bound_dead_peer(sock: Any, bound_s: float) -> None:
    """Have the kernel give up on unacknowledged data; silence of an idle link is noticed by the heartbeats."""
    if isinstance(sock, socket.socket):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(bound_s * 1000))


class SshChannel:
    """A command on an SSH channel; its stderr is drained in the background, so neither stream can stop the other."""

    def __init__(self, channel: "paramiko.Channel", target: Target) -> None:
        self._channel = channel
        self._target = target
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
            self._channel.settimeout(self._target.dead_peer_s)
            while view:
                try:
                    sent = self._channel.send(bytes(view[:_SEND_BLOCK]))
                except TimeoutError:
                    raise LinkLost(f"{self._target.name} takes no more data") from None
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
                raise LinkLost(f"the connection to {self._target.name} broke")
            return chunk

    def _alive(self) -> bool:
        transport = self._channel.get_transport()
        return bool(transport is not None and transport.is_active())

    def finish(self, timeout_s: float) -> Completed:
        """See `Channel.finish`."""
        if not self._channel.status_event.wait(timeout_s):
            raise LinkLost(f"the command on {self._target.name} closed its output but did not end")
        status = self._channel.exit_status
        if status == -1 and not self._alive():
            raise LinkLost(f"the connection to {self._target.name} broke")
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
            raise LinkLost(f"the connection to {self._target.name} broke: {error or type(error).__name__}") from error
