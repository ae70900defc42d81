"""The SSH transport against real OpenSSH servers: configuration, keys, shells, volume, limits, broken links."""

import base64
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from sshd_rig import Relay, Sshd, free_port, until

from deployctl.domain.inventory import Host, Limits
from deployctl.errors import AuthenticationError, HostKeyError, LinkLost, Unreachable
from deployctl.remote.client import Exchange, Request
from deployctl.transport import LocalTransport, connect, host_keys, ssh_config
from deployctl.transport.ssh import SshTransport, command_line
from deployctl.transport.ssh_connect import Target

LINK = "agent-python"


@pytest.fixture
def server(tmp_path, monkeypatch):
    with Sshd(tmp_path / "sshd") as sshd:
        ready(sshd, monkeypatch)
        yield sshd


def ready(sshd: Sshd, monkeypatch) -> None:
    """An interpreter under HOME, and the client's configuration for this server."""
    (sshd.home / LINK).symlink_to(sys.executable)
    monkeypatch.setenv(ssh_config.CONFIG_VARIABLE, str(sshd.config))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)


def target(sshd: Sshd, **changes) -> Target:
    settings = {"name": "x", "address": "127.0.0.1", "port": sshd.port, "connect_timeout_s": 5.0, "tries": 2}
    return Target(**{**settings, **changes})


def ping(aim: Target, **changes) -> dict:
    """The smallest operation, end to end."""
    with SshTransport(aim) as transport:
        request = Request(operation="ping", python=f"~/{LINK}", host={"state_dir": "~/.deployctl"})
        with Exchange(transport, request, **changes) as exchange:
            for _ in exchange.events():
                pass
            assert exchange.result is not None
            return exchange.result


def test_ping_over_ipv4_ipv6_and_a_host_of_the_inventory(server):
    """One session each; the inventory's host leads to the same place."""
    assert ping(target(server))["status"] == "ok"
    assert ping(target(server, address="::1"))["status"] == "ok"
    host = Host(name="h", address="127.0.0.1", port=server.port, limits=Limits(connect_s=5))
    with connect(host) as transport:
        channel = transport.open(["/bin/sh", "-c", "exit 7"])
        assert channel.receive(5) == b""
        assert channel.finish(5).status == 7
    assert isinstance(connect(Host(name="l", address="l", connection="local")), LocalTransport)
    assert server.sessions() == 3


def test_included_configuration_and_aliases(server, tmp_path):
    """Include, HostName, Port and User as `ssh` resolves them."""
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "a.conf").write_text(f"Host gpu1\n  HostName 127.0.0.1\n  Port {server.port}\n")
    server.write_client_config(f"Include {tmp_path}/conf.d/*.conf\nInclude {tmp_path}/missing.conf\n")
    assert ping(Target(name="gpu1", address="gpu1"))["status"] == "ok"
    options = ssh_config.resolve("gpu1", "ann", 2200)
    assert (options.hostname, options.user, options.port) == ("127.0.0.1", "ann", 2200)


def test_broken_configuration_is_named(server):
    """What ssh says of its configuration is passed on."""
    server.config.write_text("NoSuchOption yes\n")
    with pytest.raises(Unreachable) as caught:
        ping(target(server))
    assert "line 1: Bad configuration option: nosuchoption" in caught.value.message


def test_without_openssh_paramiko_reads_the_configuration(tmp_path, monkeypatch):
    """Plain options are honoured; Include and Match are refused, with file and line."""
    monkeypatch.setenv("PATH", str(tmp_path))
    config = tmp_path / "config"
    monkeypatch.setenv(ssh_config.CONFIG_VARIABLE, str(config))
    config.write_text("Host a\n  HostName 10.0.0.1\n  Port 23\n  User ann\n  ProxyJump none\n  IdentityFile ~/k\n")
    found = ssh_config.resolve("a", None, None)
    assert (found.hostname, found.port, found.user, found.proxy_jump) == ("10.0.0.1", 23, "ann", None)
    assert found.identity_files == (Path("~/k").expanduser(),)
    config.write_text("Host *\nInclude other\n")
    with pytest.raises(Unreachable, match=r"config:2 uses include"):
        ssh_config.resolve("a", None, None)
    config.unlink()
    assert ssh_config.resolve("h", "u", 1).hostname == "h"


def test_a_jump_host_and_a_chain_of_two(server):
    """Through one and two hops, from hosts.yaml or ssh_config."""
    hop = f"root@127.0.0.1:{server.port}"
    assert ping(target(server, jump=hop))["status"] == "ok"
    assert ping(target(server, jump=f"{hop},{hop}"))["status"] == "ok"
    with pytest.raises(Unreachable, match="the jump host cannot reach"):
        ping(Target(name="x", address="127.0.0.1", port=free_port(), jump=hop, tries=1))


def test_a_proxy_command(server):
    """ProxyCommand of ssh_config makes the way."""
    nc = f"{sys.executable} {Path(__file__).with_name('netcat.py')} 127.0.0.1 {server.port}"
    server.write_client_config(f"Host behind\n  HostName 127.0.0.1\n  Port {server.port}\n  ProxyCommand {nc}\n")
    assert ping(Target(name="behind", address="behind"))["status"] == "ok"


# -- host keys ---------------------------------------------------------------------------------------------------------


def test_a_changed_key_is_refused_with_its_line(server):
    """Name with port, file:line and the remedy; nothing is sent."""
    other = server.root / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other], check=True)
    wrong = " ".join((server.root / "other.pub").read_text().split()[:2])
    server.known_hosts.write_text(f"# first\n[127.0.0.1]:{server.port} {wrong}\n")
    for policy in ("strict", "accept-new"):
        with pytest.raises(HostKeyError) as caught:
            ping(target(server, host_keys=policy))
        assert f"[127.0.0.1]:{server.port} has changed" in caught.value.message
        assert f"{server.known_hosts}:2" in caught.value.message
        assert caught.value.hint.endswith(f"ssh-keygen -R '[127.0.0.1]:{server.port}' -f {server.known_hosts}")
    assert server.connections() == 0


def test_an_unknown_key(server):
    """Refused without a terminal; accept-new adds exactly one line and is then satisfied."""
    server.known_hosts.write_text("")
    with pytest.raises(HostKeyError, match="is not known"):
        ping(target(server))
    assert server.known_hosts.read_text() == ""
    ping(target(server, host_keys="accept-new"))
    ping(target(server))
    assert server.known_hosts.read_text() == f"[127.0.0.1]:{server.port} {server.host_key_line}\n"


def test_hashed_revoked_negated_and_ca_lines(tmp_path):
    """What OpenSSH writes into known_hosts is understood, or refused by name."""
    blob = base64.b64encode(b"key").decode()
    file = tmp_path / "known_hosts"
    salt = base64.b64encode(b"0" * 20).decode()
    import hashlib
    import hmac

    digest = base64.b64encode(hmac.new(b"0" * 20, b"h", hashlib.sha1).digest()).decode()

    def check(text: str, key: bytes = b"key", policy: str = "strict", strict: str = "ask") -> None:
        file.write_text(text)
        host_keys.check(
            hostname="h",
            port=22,
            alias=None,
            key_type="ssh-x",
            blob=key,
            files=[file],
            policy=policy,
            ssh_strict=strict,
        )

    check(f"|1|{salt}|{digest} ssh-x {blob}\n")
    check(f"*,!other ssh-x {blob}\n")
    check(f"h ssh-x not-base64!\nh ssh-x {blob}\n")
    with pytest.raises(HostKeyError, match="revoked"):
        check(f"@revoked h ssh-x {blob}\nh ssh-x {blob}\n")
    with pytest.raises(HostKeyError, match="not known"):
        check(f"*,!h ssh-x {blob}\n")
    with pytest.raises(HostKeyError, match="certificate authority"):
        check(f"@cert-authority h ssh-x {blob}\n")
    with pytest.raises(HostKeyError, match="not known"):
        check("", strict="yes")
    check("old line", policy="accept-new")
    assert file.read_text() == f"old line\nh ssh-x {blob}\n"
    check("", strict="accept-new")
    with pytest.raises(HostKeyError, match="cannot be written"):
        host_keys.check(
            hostname="h",
            port=22,
            alias="a",
            key_type="x",
            blob=b"k",
            files=[tmp_path / "known_hosts" / "x"],
            policy="accept-new",
        )


# -- authentication ----------------------------------------------------------------------------------------------------


def test_wrong_keys_are_counted(server, tmp_path, monkeypatch):
    """One wrong key, an encrypted one, and too many of an agent: said so, and never asked for a password."""
    key = tmp_path / "wrong"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    right = server.config.read_text()
    server.config.write_text(right.replace(str(server.key), str(key)))
    with pytest.raises(AuthenticationError, match="1 keys offered"):
        ping(target(server))
    locked = tmp_path / "locked"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", locked], check=True)
    server.config.write_text(right.replace(str(server.key), str(locked)))
    with pytest.raises(AuthenticationError, match=r"encrypted|1 keys offered"):
        ping(target(server))
    agent = subprocess.run(["ssh-agent", "-s"], check=True, capture_output=True, text=True).stdout
    agent_socket = agent.split("SSH_AUTH_SOCK=")[1].split(";")[0]
    pid = agent.split("SSH_AGENT_PID=")[1].split(";")[0]
    monkeypatch.setenv("SSH_AUTH_SOCK", agent_socket)
    try:
        for number in range(8):
            many = tmp_path / f"k{number}"
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", many], check=True)
            subprocess.run(["ssh-add", "-q", many], check=True)
        subprocess.run(["ssh-add", "-q", server.key], check=True)
        server.config.write_text(right)
        assert ping(target(server))["status"] == "ok"
        server.config.write_text(right.replace("IdentitiesOnly yes", "").replace(str(server.key), "/nonexistent"))
        with pytest.raises(AuthenticationError) as caught:
            ping(target(server))
        assert "9 keys offered" in caught.value.message
        assert "No existing session" not in caught.value.message
    finally:
        os.kill(int(pid), 15)


# -- shells, volume, limits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash", "/usr/bin/fish", "/usr/bin/tcsh"])
def test_login_shells(tmp_path, monkeypatch, shell):
    """The agent's command means the same to every login shell, also when it prints first."""
    script = tmp_path / "login"
    script.write_text(f'#!/bin/sh\necho noise\nexec {shell} -c "$SSH_ORIGINAL_COMMAND"\n')
    script.chmod(0o755)
    with Sshd(tmp_path / "sshd", ForceCommand=str(script)) as sshd:
        ready(sshd, monkeypatch)
        assert ping(target(sshd))["status"] == "ok"


def test_command_lines():
    """A leading ~/ is left to the shell; what no quoting keeps in all shells is refused."""
    assert command_line(["~/my env/python", "-c", "a b$c"]) == "~/'my env/python' -c 'a b$c'"
    for word in ("a\\b", "a!b", "a\nb"):
        with pytest.raises(ValueError, match="not safe"):
            command_line(["x", word])


def test_volume_in_both_directions(server):
    """Megabytes each way at once, in any bytes, and a stderr that nobody reads."""
    script = (
        "import sys,threading;d=sys.stdin.buffer;o=sys.stdout.buffer;"
        "threading.Thread(target=lambda:sys.stderr.write('e'*3000000)).start();"
        "[o.write(c) for c in iter(lambda:d.read(65536),b'')];o.flush()"
    )
    payload = bytes(range(256)) * 24000
    with SshTransport(target(server)) as transport:
        channel = transport.open([f"~/{LINK}", "-c", script])
        import threading

        sender = threading.Thread(target=lambda: (channel.send(payload), channel.send_eof()))
        sender.start()
        received = bytearray()
        while chunk := channel.receive(20):
            received += chunk
        sender.join()
        done = channel.finish(10)
        assert bytes(received) == payload
        assert done.status == 0
        assert done.stderr_tail == b"e" * 65536


def test_an_exit_by_signal_and_a_missing_program(server):
    """A signal is no status; a missing interpreter is named."""
    with SshTransport(target(server)) as transport:
        channel = transport.open(["/bin/sh", "-c", "kill -9 $$"])
        assert channel.receive(5) == b""
        ended = channel.finish(5)
        assert ended.status is None or ended.status == 137
        request = Request(operation="ping", python="~/nope", host={})
        with Exchange(transport, request) as exchange, pytest.raises(Unreachable) as caught:
            list(exchange.events())
        assert caught.value.kind_now == "no-python"
        assert "nope" in caught.value.message


def test_one_session_at_a_time_is_enough(tmp_path, monkeypatch):
    """MaxSessions 1 and no sftp."""
    with Sshd(tmp_path / "sshd", MaxSessions="1", Subsystem="none /bin/false") as sshd:
        ready(sshd, monkeypatch)
        assert ping(target(sshd))["status"] == "ok"


def test_nobody_listens_and_nobody_of_that_name():
    """Refused and unknown names: each with its own words and a hint."""
    with pytest.raises(Unreachable, match="refused the connection"):
        ping(Target(name="x", address="127.0.0.1", port=free_port(), tries=1))
    with pytest.raises(Unreachable, match="no such host"):
        ping(Target(name="x", address="no-such-host.invalid", tries=1))


def test_a_server_that_is_no_ssh_server(tmp_path):
    """Silence and nonsense end in bounded time."""
    import socket
    import threading

    listener = socket.create_server(("127.0.0.1", 0))

    def hang_up() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            client.close()

    threading.Thread(target=hang_up, daemon=True).start()
    naps: list[float] = []
    aim = Target(name="x", address="127.0.0.1", port=listener.getsockname()[1], connect_timeout_s=2, tries=1)
    with pytest.raises(Unreachable, match=r"closed the connection"):
        SshTransport(aim, sleep=naps.append).__enter__()
    # Closing at once is how a crowded sshd behaves too: patience, with growing pauses.
    assert len(naps) == 11
    listener.close()


# -- broken links ------------------------------------------------------------------------------------------------------


def test_a_link_that_is_cut(server):
    """The reader learns of it at once."""
    with Relay(server.port) as relay:
        server.known_hosts.write_text(f"[127.0.0.1]:{relay.port} {server.host_key_line}\n")
        with SshTransport(target(server, port=relay.port)) as transport:
            channel = transport.open(["/bin/sh", "-c", "echo up; sleep 60"])
            assert channel.receive(5) == b"up\n"
            relay.cut()
            with pytest.raises(LinkLost):
                until(lambda: channel.receive(1.0), 20)


def test_a_peer_that_goes_silent(server):
    """No sign of life for the bound: lost, in bounded time."""
    with Relay(server.port) as relay:
        server.known_hosts.write_text(f"[127.0.0.1]:{relay.port} {server.host_key_line}\n")
        with SshTransport(target(server, port=relay.port)) as transport:
            silent = server.home / "silent"
            silent.write_text("#!/bin/sh\nexec sleep 60\n")
            silent.chmod(0o755)
            request = Request(operation="ping", python="~/silent", host={})
            began = time.monotonic()
            with Exchange(transport, request, dead_peer_s=2.0) as exchange:
                relay.stall()
                with pytest.raises(LinkLost, match="no sign of life"):
                    list(exchange.events())
            assert time.monotonic() - began < 30
            relay.heal()


def test_a_slow_link_is_not_a_dead_one(server):
    """A second of latency each way: connecting takes its time and succeeds."""
    with Relay(server.port, delay_s=0.4) as relay:
        server.known_hosts.write_text(f"[127.0.0.1]:{relay.port} {server.host_key_line}\n")
        assert ping(target(server, port=relay.port, connect_timeout_s=15))["status"] == "ok"


class _Cutting(Relay):
    """A relay that cuts its first link after so many bytes from the client, and carries the next ones whole."""

    def __init__(self, target_port: int, after_bytes: int) -> None:
        self._left = after_bytes
        super().__init__(target_port)

    def _link(self, near) -> None:
        left, self._left = self._left, 0
        if left:
            # Either end may hang up first: the client after its last byte, the server on a broken message.
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._target)) as far, near:
                threading.Thread(target=self._pump, args=(far, near), daemon=True).start()
                while left > 0 and (chunk := near.recv(min(left, 64))):
                    far.sendall(chunk)
                    left -= len(chunk)
                near.shutdown(socket.SHUT_RDWR)
            return
        super()._link(near)


@pytest.mark.parametrize("after_bytes", range(64, 3264, 320))
def test_a_login_that_is_cut_off_is_tried_again(server, after_bytes):
    """Wherever the link breaks on the way in, nobody has refused a key: the next try gets in.

    Behind the login a cut is a lost link, and for the caller to judge.
    """
    with _Cutting(server.port, after_bytes) as relay:
        server.known_hosts.write_text(f"[127.0.0.1]:{relay.port} {server.host_key_line}\n")
        with SshTransport(target(server, port=relay.port)) as transport:
            try:
                assert until(lambda: transport.open(["/bin/echo", "in"]).receive(5.0), 20) == b"in\n"
            except LinkLost:
                assert server.connections() == 1
