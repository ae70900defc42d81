"""An SSH host on loopback inside this process: paramiko's server side, its own keys, no root and no sshd.

Commands run as `/bin/sh -c`, in sessions of their own with their own HOME, as under a real sshd: closing a channel
closes the command's stdin and does not kill it.
"""

import contextlib
import logging
import os
import select
import socket
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import paramiko
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_BLOCK = 65536


class EmbeddedHost:
    """A loopback SSH server that accepts one key, made for it.

    Args:
        root: A folder for keys, home and client configuration.
        environment: Added to the commands' environment.

    Attributes:
        port: Where it listens on 127.0.0.1.
        home: HOME of its commands.
        ssh_config: A client configuration that reaches it.
        known_hosts: The matching known_hosts.
        sessions: How many commands were started.
    """

    def __init__(self, root: Path, environment: Mapping[str, str] | None = None) -> None:
        self.root = root
        self.home = root / "home"
        self.home.mkdir(parents=True, exist_ok=True)
        self.ssh_config = root / "ssh_config"
        self.known_hosts = root / "known_hosts"
        self.sessions = 0
        self._environment = {
            "HOME": str(self.home),
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "LANG": os.environ.get("LANG", "C.UTF-8"),
            **(environment or {}),
        }
        self._host_key, _ = _make_key(root / "host_key")
        _, self._client_public = _make_key(root / "client_key")
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._transports: list[paramiko.Transport] = []
        self._ended = False

    def __enter__(self) -> Self:
        logging.getLogger("paramiko").setLevel(logging.CRITICAL)
        key = self._host_key
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {key.get_name()} {key.get_base64()}\n")
        self.ssh_config.write_text(
            f"Host *\n  HostName 127.0.0.1\n  Port {self.port}\n  User demo\n"
            f"  IdentityFile {self.root / 'client_key'}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.known_hosts}\n  GlobalKnownHostsFile /dev/null\n"
        )
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._ended = True
        # Closing alone does not wake a thread that sits in accept().
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for transport in self._transports:
            transport.close()

    def _accept(self) -> None:
        while not self._ended:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport = paramiko.Transport(client)
        transport.add_server_key(self._host_key)
        self._transports.append(transport)
        with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
            transport.start_server(server=_Server(self, self._client_public))

    def start(self, command: bytes, channel: paramiko.Channel) -> None:
        """Run a command for a channel."""
        self.sessions += 1
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            cwd=self.home,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        threading.Thread(target=_attend, args=(process, channel), daemon=True).start()


def _make_key(path: Path) -> tuple[paramiko.PKey, str]:
    """An ed25519 key pair in OpenSSH's format at `path`; the key, and the base64 of its public half."""
    private = Ed25519PrivateKey.generate()
    text = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as out:
        out.write(text)
    key = paramiko.Ed25519Key.from_private_key_file(str(path))
    return key, key.get_base64()


class _Server(paramiko.ServerInterface):
    def __init__(self, host: EmbeddedHost, public: str) -> None:
        self._host = host
        self._public = public

    def get_allowed_auths(self, username: str) -> str:  # noqa: ARG002
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:  # noqa: ARG002
        return paramiko.AUTH_SUCCESSFUL if key.get_base64() == self._public else paramiko.AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:  # noqa: ARG002
        return paramiko.OPEN_SUCCEEDED if kind == "session" else paramiko.OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        # The reply must go out before the output does.
        threading.Thread(target=self._host.start, args=(command, channel), daemon=True).start()
        return True


def _attend(process: "subprocess.Popen[bytes]", channel: paramiko.Channel) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    feeder = threading.Thread(target=_feed, args=(channel, process.stdin), daemon=True)
    feeder.start()
    pumps = [
        threading.Thread(target=_pump, args=(process.stdout, channel.sendall), daemon=True),
        threading.Thread(target=_pump, args=(process.stderr, channel.sendall_stderr), daemon=True),
    ]
    for pump in pumps:
        pump.start()
    status = process.wait()
    for pump in pumps:
        # A grandchild may hold the pipes open for ever; what the command itself wrote has been read by then.
        pump.join(2.0)
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        channel.send_exit_status(status if status >= 0 else 128 - status)
        channel.shutdown_write()
        channel.close()


def _feed(channel: paramiko.Channel, stdin: IO[bytes]) -> None:
    with contextlib.suppress(OSError, EOFError):
        while chunk := channel.recv(_BLOCK):
            stdin.write(chunk)
            stdin.flush()
    with contextlib.suppress(OSError):
        stdin.close()


def _pump(source: IO[bytes], send: object) -> None:
    assert callable(send)
    handle = source.fileno()
    with contextlib.suppress(OSError, EOFError):
        while True:
            select.select([handle], [], [])
            chunk = os.read(handle, _BLOCK)
            if not chunk:
                break
            send(chunk)
    source.close()
