"""The embedded SSH host behaves as an sshd, to OpenSSH's client and to paramiko."""

import hashlib
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import paramiko
import pytest
from demo_engine import DEADLINE_S, alive, until

from deployctl.demo import sshhost
from deployctl.demo.sshhost import EmbeddedHost

BYTES = bytes(range(256)) * 16 * 1024  # 4 MiB: more than a channel's window


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """A host in a folder whose name has a space."""
    with EmbeddedHost(tmp_path_factory.mktemp("embedded host"), {"COLOUR": "blue"}) as embedded:
        yield embedded


@pytest.fixture
def client(host):
    """A paramiko client, connected."""
    with connect(host) as connected:
        yield connected


def connect(host):
    # paramiko leaves Nagle's algorithm on, which costs 40 ms a command.
    plain = socket.create_connection((host.address, host.port))
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client = paramiko.SSHClient()
    client.load_host_keys(str(host.known_hosts))
    client.connect(
        host.address,
        host.port,
        username=host.user,
        key_filename=str(host.client_key),
        allow_agent=False,
        look_for_keys=False,
        sock=plain,
    )
    return client


def ssh(host, *words, **options):
    argv = ["ssh", "-F", host.ssh_config, "anything", *words]
    return subprocess.run(argv, capture_output=True, timeout=DEADLINE_S, check=False, **options)


def session(client, command):
    channel = client.get_transport().open_session(timeout=DEADLINE_S)
    channel.settimeout(DEADLINE_S)
    channel.exec_command(command)
    return channel


def read_all(channel):
    received = bytearray()
    while chunk := channel.recv(65536):
        received += chunk
    return bytes(received)


def test_openssh_gets_output_error_and_status_apart(host):
    """Three streams of one command, under the host's environment and home."""
    done = ssh(host, 'printf "%s %s" "$HOME" "$COLOUR"; pwd >&2; exit 7')
    assert (7, f"{host.home} blue".encode(), f"{host.home}\n".encode()) == (done.returncode, done.stdout, done.stderr)


def test_the_command_is_a_shell_line(host):
    """Quotes, expansion and pipes are /bin/sh's; bytes pass as they are."""
    assert "a  b:č" == ssh(host, "printf '%s' 'a  b' | cat; printf ':%s' č").stdout.decode()


@pytest.mark.parametrize("command", ["cat", "cat >&2"])
def test_openssh_moves_any_bytes_both_ways(host, command):
    """More than any window, every byte value, stdout or stderr."""
    done = ssh(host, command, input=BYTES)
    received = done.stderr if ">&2" in command else done.stdout
    assert (0, hashlib.sha256(BYTES).hexdigest()) == (done.returncode, hashlib.sha256(received).hexdigest())


def test_unread_input_delays_nobody(host):
    """A command that ends without reading gives its status, not a broken connection."""
    assert 5 == ssh(host, "exit 5", input=BYTES).returncode


def test_paramiko_half_closes_both_ways(client):
    """EOF of the client ends `sort`'s reading; its answer comes after; then EOF of the host, then the status."""
    channel = session(client, "sort")
    channel.sendall(b"b\na\n")
    channel.shutdown_write()
    assert b"a\nb\n" == read_all(channel)
    assert 0 == channel.recv_exit_status()


def test_a_command_that_closes_its_output_goes_on_reading(client, host):
    """The host's EOF does not end the command: input still arrives, and the status comes at the end."""
    channel = session(client, "exec >&- 2>&-; cat > half-closed; exit 3")
    channel.sendall(b"late")
    channel.shutdown_write()
    assert 3 == channel.recv_exit_status()
    assert b"late" == (host.home / "half-closed").read_bytes()


def test_output_arrives_while_the_command_runs(client):
    """A conversation: each line is answered before the next is sent."""
    channel = session(client, "while read word; do echo got $word; done")
    for word in ("one", "two", "three"):
        channel.sendall(word.encode() + b"\n")
        assert f"got {word}\n".encode() == channel.recv(100)
    channel.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_death_by_signal_is_told_as_such(client, number):
    """exit-signal with the signal's name: no exit status comes, and paramiko says -1."""
    told = threading.Event()
    names = []
    channel = client.get_transport().open_session(timeout=DEADLINE_S)
    plain = channel._handle_request

    def listen(message):
        name = message.get_text()
        if name == "exit-signal":
            message.get_boolean()
            names.append(message.get_text())
            told.set()
        message.rewind()
        # The first integer of a channel message has been read by the transport.
        message.get_int()
        plain(message)

    client.get_transport()._channel_handler_table = {
        **type(client.get_transport())._channel_handler_table,
        paramiko.common.MSG_CHANNEL_REQUEST: lambda _, message: listen(message),
    }
    channel.exec_command(f"kill -{int(number)} $$")
    assert told.wait(DEADLINE_S)
    assert [number.name.removeprefix("SIG")] == names
    assert -1 == channel.recv_exit_status()


def test_a_signal_without_a_name_is_told_as_well(client):
    """A real-time signal: no name in the protocol, and nobody waits for ever."""
    channel = session(client, "echo before; kill -40 $$")
    assert (b"before\n", -1) == (read_all(channel), channel.recv_exit_status())


def test_openssh_shows_a_signal_as_255(host):
    """As with sshd."""
    assert 255 == ssh(host, "kill -9 $$").returncode


def test_closing_a_channel_closes_stdin_and_ends_nothing(client, host):
    """The command sees the end of its input and finishes its work."""
    channel = session(client, "echo started; cat > /dev/null; echo done > finished")
    assert b"started\n" == channel.recv(100)
    channel.close()
    until(lambda: (host.home / "finished").exists() and (host.home / "finished").read_text() == "done\n")


def test_a_dropped_link_ends_nothing(host):
    """The connection goes, the command sees the end of its input and goes on; the next connection works."""
    with connect(host) as lost:
        channel = session(lost, "echo started; cat > /dev/null; echo done > survived")
        assert b"started\n" == channel.recv(100)
        host.drop_connections()
        until(lambda: not lost.get_transport().is_active())
    until(lambda: (host.home / "survived").exists() and (host.home / "survived").read_text() == "done\n")
    assert b"again\n" == ssh(host, "echo again").stdout


def test_a_held_output_keeps_the_channel_open(client, host):
    """As with sshd: a background job that inherits the output delays the end, one that does not returns at once."""
    channel = session(client, "mkfifo gate; (read x < gate; echo released) & exit 0")
    assert 0 == channel.recv_exit_status()
    assert not channel.eof_received
    free = session(client, "sleep 60 > /dev/null 2>&1 < /dev/null & echo $!")
    pid = read_all(free)
    assert 0 == free.recv_exit_status()
    session(client, f"kill {int(pid)}; echo go > gate").recv_exit_status()
    assert b"released\n" == read_all(channel)


def test_commands_lead_their_own_session(host):
    """What a client's Ctrl-C or this process's end would signal does not reach them."""
    pid, sid = ssh(host, "echo $$ $(ps -o sid= -p $$)").stdout.split()
    assert pid == sid


def test_many_channels_and_connections_at_once(host):
    """Twenty connections with five commands each, all with their own answer."""

    def one(number):
        with connect(host) as connected:
            channels = [session(connected, f"cat; echo {number}.{part}") for part in range(5)]
            for channel in channels:
                channel.shutdown_write()
            return [read_all(channel).decode().strip() for channel in channels]

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(one, range(20)))
    assert [[f"{number}.{part}" for part in range(5)] for number in range(20)] == answers


def test_the_shortest_commands_are_always_told_in_order(client):
    """The acceptance of a command goes out before its end, however fast that comes."""
    for _ in range(100):
        assert 0 == session(client, "").recv_exit_status()


def test_a_client_may_do_without_the_acceptance(client):
    """A command whose request wants no reply runs as any other."""
    transport = client.get_transport()
    channel = transport.open_session(timeout=DEADLINE_S)
    channel.settimeout(DEADLINE_S)
    message = paramiko.Message()
    message.add_byte(paramiko.common.cMSG_CHANNEL_REQUEST)
    message.add_int(channel.remote_chanid)
    message.add_string("exec")
    message.add_boolean(False)
    message.add_string("read word; echo got $word; exit 4")
    transport._send_user_message(message)
    channel.sendall(b"it\n")
    assert (b"got it\n", 4) == (read_all(channel), channel.recv_exit_status())


def test_a_command_that_cannot_be_one_is_refused(client):
    """A NUL in it would cut it short; the connection goes on."""
    with pytest.raises(paramiko.SSHException):
        session(client, b"echo cut\0 > cut")
    assert b"on\n" == read_all(session(client, "echo on"))


def test_a_command_too_long_for_the_system_is_said(client, host):
    """Reason and status, as a shell gives it."""
    channel = session(client, "true " + "x" * 200_000)
    text = channel.makefile_stderr("rb").read().decode()
    assert ("embedded host: [Errno 7] Argument list too long: '/bin/sh'\n", 126) == (
        text,
        channel.recv_exit_status(),
    )


def test_a_channel_runs_one_command(client, host):
    """A second request on it is refused and starts nothing."""
    channel = session(client, "read word")
    with pytest.raises(paramiko.SSHException):
        channel.exec_command("touch second")
    assert b"" == read_all(session(client, "ls second 2> /dev/null"))


def test_keep_alives_are_answered(client):
    """The request that OpenSSH sends to see whether the host is there; any answer will do, and the link stays."""
    transport = client.get_transport()
    assert None is transport.global_request("keepalive@openssh.com", wait=True)
    assert b"there\n" == read_all(session(client, "echo there"))


def test_only_its_own_key_and_user_get_in(host, tmp_path):
    """Another key, another user, and no key at all are refused."""
    other = paramiko.ECDSAKey.generate()
    for options in (
        {"username": host.user, "pkey": other},
        {"username": "somebody", "key_filename": str(host.client_key)},
        {"username": host.user, "password": "guess"},
    ):
        with paramiko.SSHClient() as stranger:
            stranger.load_host_keys(str(host.known_hosts))
            with pytest.raises(paramiko.AuthenticationException):
                stranger.connect(host.address, host.port, allow_agent=False, look_for_keys=False, **options)


def test_forwards_terminals_and_sftp_are_not_there(client, host):
    """Refused in the protocol's own way; the connection goes on."""
    transport = client.get_transport()
    with pytest.raises(paramiko.ChannelException):
        transport.open_channel("direct-tcpip", ("127.0.0.1", 22), ("127.0.0.1", 1), timeout=DEADLINE_S)
    with pytest.raises(paramiko.SSHException):
        client.open_sftp()
    assert b"ok\n" == read_all(session(client, "echo ok"))


def test_a_session_without_a_command_is_a_shell_on_stdin(host):
    """`ssh host < script` works."""
    assert b"from stdin\n" == ssh(host, input=b"echo from stdin\n").stdout


def test_noise_on_its_port_hurts_nobody(host, caplog, capfd):
    """A scanner that says nothing or nonsense is dropped, quietly."""
    for text in (b"", b"GET / HTTP/1.0\r\n\r\n" * 100):
        with socket.create_connection((host.address, host.port)) as scanner:
            scanner.sendall(text)
    assert b"ok\n" == ssh(host, "echo ok").stdout
    assert ("", "", "") == (caplog.text, *capfd.readouterr())


def test_the_same_folder_is_the_same_host(tmp_path):
    """Restarted at its port it has its key still, so its clients trust it; after its end the port is closed."""
    with EmbeddedHost(tmp_path) as first:
        assert b"1\n" == ssh(first, "echo 1").stdout
        kept = first.known_hosts.read_text()
    with EmbeddedHost(tmp_path, port=first.port) as second:
        assert b"2\n" == ssh(second, "echo 2").stdout
        assert kept == second.known_hosts.read_text()
    assert 255 == ssh(second, "echo 3").returncode


def test_leaving_ends_its_commands_and_spares_what_was_detached(tmp_path):
    """Commands that wait for input end with it; a process in a session of its own stays."""
    with EmbeddedHost(tmp_path) as host, connect(host) as connected:
        detached = session(connected, "setsid sleep 60 > /dev/null 2>&1 < /dev/null & echo $!")
        pid = int(read_all(detached))
        waiting = session(connected, "echo $$; exec cat")
        attached = int(waiting.recv(100))
    commands = {int(line.split()[0]): line for line in processes()}
    try:
        assert attached not in commands
        assert "sleep 60" in commands[pid]
    finally:
        subprocess.run(["kill", str(pid)], check=True)


def test_leaving_takes_no_longer_for_many_commands_than_for_one(tmp_path, monkeypatch):
    """They share one grace; then all are ended."""
    monkeypatch.setattr(sshhost, "_PATIENCE_S", 1.0)
    count = 12
    with EmbeddedHost(tmp_path) as host, connect(host) as connected:
        channels = [session(connected, "echo $$; sleep 60") for _ in range(count)]
        pids = [int(channel.recv(100)) for channel in channels]
        began = time.monotonic()
    assert time.monotonic() - began < count / 2
    assert [] == [pid for pid in pids if alive(pid)]


def processes():
    return subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True, check=True).stdout.splitlines()
