"""A real OpenSSH server on loopback with its own keys, home and log, and a relay that delays or cuts its link."""

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from pathlib import Path


def free_port(family: int = socket.AF_INET) -> int:
    """A port that nobody listens on; not above 55535, since the engine takes port + 10000 for itself too."""
    while True:
        with socket.socket(family) as probe:
            probe.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
            port = probe.getsockname()[1]
        if port <= 55535:
            return port


def until(condition, deadline_s: float = 20.0, what: str = "the event"):
    """Poll for an event; the deadline only bounds a failure."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"{what} did not come within {deadline_s} s")


class Sshd:
    """An sshd of our own.

    Args:
        root: An empty folder for its keys, home, log and the client's configuration.
        options: Lines of sshd_config, such as `MaxSessions="1"`.
        environment: What commands get beside HOME and PATH.
    """

    def __init__(self, root: Path, environment: dict[str, str] | None = None, **options: str) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        self.home = root / "home"
        self.home.mkdir(exist_ok=True)
        self.port = free_port()
        self.log = root / "sshd.log"
        self.known_hosts = root / "known_hosts"
        self.config = root / "ssh_config"
        self.key = root / "id"
        for name in ("host", "id"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", root / name], check=True)
        shutil.copy(root / "id.pub", root / "ak")
        public = (root / "host.pub").read_text().split()
        self.host_key_line = " ".join(public[:2])
        self.trust()
        variables = {"HOME": str(self.home), "PATH": f"{root}/bin:{os.environ['PATH']}", **(environment or {})}
        lines = [
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            "ListenAddress ::1",
            f"HostKey {root}/host",
            f"AuthorizedKeysFile {root}/ak",
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "PermitRootLogin yes",
            f"PidFile {root}/sshd.pid",
            "LogLevel VERBOSE",
            "SetEnv " + " ".join(f'"{key}={value}"' for key, value in variables.items()),
            *(f"{key} {value}" for key, value in options.items()),
        ]
        if "Subsystem" not in options:
            lines.append("Subsystem sftp /usr/lib/openssh/sftp-server")
        (root / "sshd_config").write_text("\n".join(lines) + "\n")
        self.write_client_config()
        self._process: subprocess.Popen | None = None

    def trust(self) -> None:
        """The client's known_hosts knows this server under each of its names."""
        names = ",".join(f"[{name}]:{self.port}" for name in ("127.0.0.1", "localhost", "::1"))
        self.known_hosts.write_text(f"{names} {self.host_key_line}\n")

    def write_client_config(self, extra: str = "") -> None:
        self.config.write_text(
            f"{extra}\nHost *\n  User root\n  IdentityFile {self.key}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.known_hosts}\n  GlobalKnownHostsFile /dev/null\n"
        )

    def __enter__(self) -> "Sshd":
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def start(self) -> None:
        Path("/run/sshd").mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            ["/usr/sbin/sshd", "-D", "-f", self.root / "sshd_config", "-E", self.log], stdin=subprocess.DEVNULL
        )
        until(self._accepts, what="sshd")

    def _accepts(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> None:
        if self._process is not None:
            self.drop_connections()
            self._process.terminate()
            self._process.wait(10)
            self._process = None

    def children(self) -> list[int]:
        """Pids of the per-connection processes."""
        assert self._process is not None
        found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(self._process.pid)], capture_output=True, text=True)
        return [int(word) for word in found.stdout.split()]

    def drop_connections(self) -> None:
        """Cut every connection, as a lost link or an sshd restart would."""
        for pid in self.children():
            for child in subprocess.run(
                ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True
            ).stdout.split():
                name = subprocess.run(["ps", "-o", "comm=", "-p", child], capture_output=True, text=True).stdout
                if name.strip().startswith("sshd"):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(child), signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def sessions(self) -> int:
        """How many commands (exec, subsystem, shell) were started, by sshd's own log."""
        return self.log.read_text(errors="replace").count("Starting session:")

    def connections(self) -> int:
        return self.log.read_text(errors="replace").count("Accepted publickey")


class Relay:
    """A TCP relay to a port: each direction is delayed by `delay_s` without limiting its bandwidth.

    `cut()` closes all links and refuses new ones until `heal()`; `stall()` stops forwarding without closing.
    """

    def __init__(self, target_port: int, delay_s: float = 0.0) -> None:
        self._target = target_port
        self.delay_s = delay_s
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        self._links: list[tuple[socket.socket, socket.socket]] = []
        self._up = threading.Event()
        self._up.set()
        self._flow = threading.Event()
        self._flow.set()
        self._ended = False
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *_) -> None:
        self._ended = True
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        self._up.clear()
        links, self._links = self._links, []
        for pair in links:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def heal(self) -> None:
        self._up.set()
        self._flow.set()

    def stall(self) -> None:
        self._flow.clear()

    def _accept(self) -> None:
        while not self._ended:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if not self._up.is_set():
                near.close()
                continue
            # The handshake of a distant host costs a round trip too.
            threading.Thread(target=self._link, args=(near,), daemon=True).start()

    def _link(self, near: socket.socket) -> None:
        time.sleep(self.delay_s * 2)
        try:
            far = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            near.close()
            return
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._links.append((near, far))
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        queue: deque[tuple[float, bytes]] = deque()
        try:
            open_ = True
            while open_ or queue:
                wait = max(0.0, queue[0][0] - time.monotonic()) if queue else None
                ready = select.select([source], [], [], wait)[0] if open_ else []
                if not open_ and wait:
                    time.sleep(wait)
                if ready:
                    chunk = source.recv(65536)
                    if chunk:
                        queue.append((time.monotonic() + self.delay_s, chunk))
                    else:
                        open_ = False
                while queue and queue[0][0] <= time.monotonic():
                    self._flow.wait()
                    sink.sendall(queue.popleft()[1])
            sink.shutdown(socket.SHUT_WR)
        except (OSError, ValueError):
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
