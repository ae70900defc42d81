"""From a target to a logged-in paramiko client: the way there, credentials, the host's key, and what went wrong.

paramiko alone: Fabric adds a third of a second of imports to every command and brings what is not used here (its `run`
sends input a byte every 10 ms, its connection accepts any host key); gateways and proxy commands are a few lines below.
"""

import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from deployctl.errors import AuthenticationError, DeployError, Unreachable
from deployctl.transport import host_keys, ssh_config

if TYPE_CHECKING:
    import paramiko

_KEEPALIVE_S = 15


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


class Crowded(Unreachable):
    """The server closed the connection before it said anything: it limits connections that come at once."""


class Transient(Unreachable):
    """Refused, reset, or timed out: worth another try."""


def connect(
    target: Target,
    options: ssh_config.SshOptions,
    early: Callable[[], Any] | None,
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
        sock = early() if early is not None else None
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
    return Transient(f"the connection to {where} broke while logging in", hint="the same command again")


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
            previous = connect(hop_target, hop_options, None, way)
        else:
            previous = connect(hop_target, hop_options, partial(_through, previous, hop_options, target), way)
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
        raise Transient(
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
        return Crowded(
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
    return Transient(f"no connection to {where}: {text}", hint=f"try: ssh -p {options.port} {options.hostname} true")


def _no_connection(error: BaseException, where: str, target: Target) -> DeployError:
    if isinstance(error, DeployError):
        return error
    if isinstance(error, socket.gaierror):
        return Unreachable(f"no such host: {where} ({error.strerror})", hint="check `address` in hosts.yaml")
    if isinstance(error, TimeoutError):
        return Transient(
            f"{where} does not answer within {target.connect_timeout_s:g} s",
            hint="is the machine up, the network there?",
        )
    if isinstance(error, ConnectionRefusedError):
        return Transient(f"{where} refused the connection", hint="is sshd running there, on that port?")
    if isinstance(error, (ConnectionResetError, EOFError)):
        return Crowded(f"{where} closed the connection", hint="sshd's MaxStartups limits connections at once")
    nested = getattr(error, "errors", None)
    if isinstance(nested, dict) and nested:
        return _no_connection(next(iter(nested.values())), where, target)
    return Transient(f"no connection to {where}: {error}", hint="try: ssh to that host by hand")


def _bound_dead_peer(sock: Any, bound_s: float) -> None:
    """Have the kernel give up on unacknowledged data; silence of an idle link is noticed by the heartbeats."""
    if isinstance(sock, socket.socket):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(bound_s * 1000))
