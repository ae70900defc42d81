"""An SSH host on loopback inside this process: paramiko's server side, keys of its own, no root and no sshd.

Commands run as a real sshd runs them: `/bin/sh -c`, a session and a HOME of their own, three pipes.
Closing a channel closes the command's stdin and does not end it; a channel stays open as long as any process holds
the command's output.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, ClassVar, Self

import paramiko
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from paramiko.common import (
    AUTH_FAILED,
    AUTH_SUCCESSFUL,
    MSG_CHANNEL_REQUEST,
    OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED,
    OPEN_SUCCEEDED,
    cMSG_CHANNEL_REQUEST,
)

_BLOCK = 65536
_PATIENCE_S = 5.0
_CLIENT_IS_GONE = (OSError, EOFError, paramiko.SSHException)
_LOGGER = "deployctl.demo.sshhost"
# A client that hangs up is nothing to tell anybody; the library logs a traceback for each.
logging.getLogger(_LOGGER).setLevel(logging.CRITICAL + 1)


class EmbeddedHost:
    """A loopback SSH server, as a context manager. It lets in the holder of one key, made for it.

    Args:
        root: A folder for its keys, its home and the configuration of its clients; made if missing. Keys that lie there
            are used again, so a host that starts anew is the same host.
        environment: Added to the environment of its commands.
        cwd: Where commands start; default the home.
        port: On 127.0.0.1; 0 takes a free one.
        user: The only user it knows.

    Attributes:
        port: Where it listens.
        home: HOME of its commands.
        client_key: The private key that it lets in.
        ssh_config: A client configuration that reaches it under any host name.
        known_hosts: The known_hosts file that names its key.
        sessions: How many commands were started.
    """

    address = "127.0.0.1"

    def __init__(
        self,
        root: Path,
        environment: Mapping[str, str] | None = None,
        *,
        cwd: Path | None = None,
        port: int = 0,
        user: str = "demo",
    ) -> None:
        self.root = root.absolute()
        self.home = self.root / "home"
        self.home.mkdir(parents=True, exist_ok=True)
        self.cwd = cwd or self.home
        self.user = user
        self.client_key = self.root / "client_key"
        self.ssh_config = self.root / "ssh_config"
        self.known_hosts = self.root / "known_hosts"
        self.sessions = 0
        self.environment = {
            "HOME": str(self.home),
            "USER": user,
            "LOGNAME": user,
            "SHELL": "/bin/sh",
            "PATH": os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin"),
            "LANG": "C.UTF-8",
            **(environment or {}),
        }
        self.host_key = _key(self.root / "host_key")
        self.client_public = _key(self.client_key).asbytes()
        self._listener = socket.create_server((self.address, port), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._connections: set[_Connection] = set()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._acceptor = threading.Thread(target=self._accept, name="embedded-host", daemon=True)
        self._ended = False

    def __enter__(self) -> Self:
        name = f"[{self.address}]:{self.port}"
        self.known_hosts.write_text(f"{name} {self.host_key.get_name()} {self.host_key.get_base64()}\n")
        self.ssh_config.write_text(
            f"Host *\n  HostName {self.address}\n  Port {self.port}\n  User {self.user}\n"
            f'  IdentityFile "{self.client_key}"\n  IdentitiesOnly yes\n  IdentityAgent none\n'
            f'  UserKnownHostsFile "{self.known_hosts}"\n  GlobalKnownHostsFile /dev/null\n'
            "  StrictHostKeyChecking yes\n  PasswordAuthentication no\n  LogLevel ERROR\n"
        )
        self._acceptor.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended = True
        # Closing a listener does not wake the thread that waits on it; a connection does, on every system.
        with contextlib.suppress(OSError), socket.create_connection((self.address, self.port), timeout=_PATIENCE_S):
            pass
        self._acceptor.join(_PATIENCE_S)
        self._listener.close()
        self.drop_connections()
        self._end_commands()

    def drop_connections(self) -> None:
        """Cut every connection, as a lost link does: no goodbye, and the commands go on."""
        with self._lock:
            connections, self._connections = self._connections, set()
        for connection in connections:
            connection.close()

    def _end_commands(self) -> None:
        """Commands had their stdin closed and may end by themselves; what does not in time is ended with its group.

        What left its session, such as a server that was started detached, is not ours any more.
        """
        with self._lock:
            processes = list(self._processes)
        deadline = time.monotonic() + _PATIENCE_S
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _accept(self) -> None:
        while True:
            try:
                client, peer = self._listener.accept()
            except OSError:
                return
            if self._ended:
                client.close()
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(client)
            connection.set_log_channel(_LOGGER)
            connection.add_server_key(self.host_key)
            with self._lock:
                self._connections = {other for other in self._connections if other.is_alive()} | {connection}
            # With an event the negotiation goes on in the connection's own thread.
            connection.start_server(event=threading.Event(), server=_Server(self, connection, peer))

    def run(self, argv: list[bytes | str], channel: paramiko.Channel, peer: tuple[str, int]) -> None:
        """Run a command for a channel, to the end of both."""
        client = f"{peer[0]} {peer[1]}"
        session = {
            "SSH_CLIENT": f"{client} {self.port}",
            "SSH_CONNECTION": f"{client} {self.address} {self.port}",
        }
        try:
            process = subprocess.Popen(
                argv,
                cwd=self.cwd,
                env={**self.environment, **session},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            with contextlib.suppress(*_CLIENT_IS_GONE):
                channel.sendall_stderr(f"embedded host: {error}\n".encode())
                channel.send_exit_status(126)
            with contextlib.suppress(*_CLIENT_IS_GONE):
                channel.close()
            return
        with self._lock:
            self.sessions += 1
            self._processes.add(process)
        try:
            _attend(process, channel)
        finally:
            with self._lock:
                self._processes.discard(process)


def _key(path: Path) -> paramiko.Ed25519Key:
    """The private key at `path` in OpenSSH's format, made if it is not there.

    Ed25519, because it is the last kind that paramiko's client tries a key file as: with another, its complaint about
    the format hides why the host refused the key.
    """
    if not path.exists():
        text = Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(text)
    return paramiko.Ed25519Key.from_private_key_file(str(path))


def _handle_request(channel: paramiko.Channel, message: paramiko.Message) -> None:
    """Answer a channel's request, if it wants an answer, and start the command that it asked for only then.

    A command may end before its own acceptance is on the wire otherwise, and clients take that for a failure.
    """
    paramiko.Channel._handle_request(channel, message)  # type: ignore[attr-defined]  # noqa: SLF001
    connection = channel.get_transport()
    if isinstance(connection, _Connection):
        connection.start_accepted()


class _Connection(paramiko.Transport):
    """A connection, with the commands that its requests asked for and that have not started yet."""

    _channel_handler_table: ClassVar = {
        **paramiko.Transport._channel_handler_table,  # type: ignore[attr-defined]  # noqa: SLF001
        MSG_CHANNEL_REQUEST: _handle_request,
    }

    def __init__(self, client: socket.socket) -> None:
        super().__init__(client)
        self.accepted: list[Callable[[], None]] = []

    def start_accepted(self) -> None:
        """Start them, in the order of their requests."""
        while self.accepted:
            self.accepted.pop(0)()


class _Server(paramiko.ServerInterface):
    """What a client may do: log in with the key, open sessions, run commands or a shell that reads its stdin."""

    def __init__(self, host: EmbeddedHost, connection: _Connection, peer: tuple[str, int]) -> None:
        self._host = host
        self._connection = connection
        self._peer = peer
        self._used: weakref.WeakSet[paramiko.Channel] = weakref.WeakSet()

    def get_allowed_auths(self, username: str) -> str:  # noqa: ARG002
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        known = username == self._host.user and key.asbytes() == self._host.client_public
        return AUTH_SUCCESSFUL if known else AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:  # noqa: ARG002
        return OPEN_SUCCEEDED if kind == "session" else OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        # A shell line ends at a NUL; running half of it would be worse than refusing.
        return b"\0" not in command and self._accept(channel, ["/bin/sh", "-c", command])

    def check_channel_shell_request(self, channel: paramiko.Channel) -> bool:
        return self._accept(channel, ["/bin/sh"])

    def _accept(self, channel: paramiko.Channel, argv: list[bytes | str]) -> bool:
        """One command a channel (RFC 4254, section 6.5)."""
        if channel in self._used:
            return False
        self._used.add(channel)
        thread = threading.Thread(target=self._host.run, args=(argv, channel, self._peer), daemon=True)
        self._connection.accepted.append(thread.start)
        return True


def _attend(process: subprocess.Popen[bytes], channel: paramiko.Channel) -> None:
    """Carry bytes both ways until the command has ended and nothing holds its output any more."""
    if process.stdin is None or process.stdout is None or process.stderr is None:
        raise ValueError("the process must have been started with three pipes")
    threading.Thread(target=_feed, args=(channel, process.stdin), daemon=True).start()
    pumps = [
        threading.Thread(target=_pump, args=(process.stdout, channel.sendall), daemon=True),
        threading.Thread(target=_pump, args=(process.stderr, channel.sendall_stderr), daemon=True),
    ]
    for pump in pumps:
        pump.start()
    status = process.wait()
    with contextlib.suppress(*_CLIENT_IS_GONE):
        if status >= 0:
            channel.send_exit_status(status)
        else:
            _send_exit_signal(channel, -status)
    for pump in pumps:
        pump.join()
    with contextlib.suppress(*_CLIENT_IS_GONE):
        channel.shutdown_write()
        channel.close()


def _send_exit_signal(channel: paramiko.Channel, number: int) -> None:
    """RFC 4254, section 6.10: the signal's name without SIG, core dumped, message, language."""
    message = paramiko.Message()
    message.add_byte(cMSG_CHANNEL_REQUEST)
    message.add_int(channel.remote_chanid)
    message.add_string("exit-signal")
    message.add_boolean(False)
    message.add_string(_signal_name(number))
    message.add_boolean(False)
    message.add_string("")
    message.add_string("")
    channel.get_transport()._send_user_message(message)  # type: ignore[attr-defined]  # noqa: SLF001


def _signal_name(number: int) -> str:
    """A signal's name without SIG; one that has none, such as most real-time signals, by its number."""
    try:
        return signal.Signals(number).name.removeprefix("SIG")
    except ValueError:
        return f"{number}@deployctl"


def _feed(channel: paramiko.Channel, stdin: IO[bytes]) -> None:
    """From the client to the command; what a command does not read is taken and dropped, so that nobody waits."""
    reading = True
    with contextlib.suppress(*_CLIENT_IS_GONE):
        while chunk := channel.recv(_BLOCK):
            if reading:
                try:
                    _write_all(stdin.fileno(), chunk)
                except BrokenPipeError:
                    reading = False
    with contextlib.suppress(OSError):
        stdin.close()


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def _pump(source: IO[bytes], send: Callable[[bytes], object]) -> None:
    """From the command to the client; when the client is gone, the command finds its output closed."""
    with contextlib.suppress(*_CLIENT_IS_GONE), source:
        while chunk := os.read(source.fileno(), _BLOCK):
            send(chunk)
