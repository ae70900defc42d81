"""What is looked at before a server is started, and how it is started."""

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from launch_host import free_port, until

from deployctl.agent import attempts, launch, lock, processes
from deployctl.agent.failure import Failure

IDLE = """
import time
while True:
    print("x" * 200, flush=True)
    time.sleep(0.02)
"""


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder):
    """Write until nothing more fits."""
    with contextlib.suppress(OSError), open(folder / "filler", "wb", buffering=0) as out:
        while True:
            out.write(b"x" * 4096)
    assert os.statvfs(folder).f_bavail == 0


def test_no_wait_returns_while_the_server_runs_on_its_own(host):
    """In its own session with stdin empty and output in the log, under a keeper that holds nothing of the command's."""
    result = host.launch("a", argv=host.script(IDLE), wait=False)
    assert (result["status"], result["exit"]) == ("loading", 0)
    pid, start = host.server()
    run = host.attempt()["run"]
    assert processes.alive(pid, start)
    assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
    assert {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (1, 2)} == {str(host.log())}
    assert os.getsid(pid) == pid
    assert os.getsid(run["keeper_pid"]) not in (os.getsid(0), pid)
    for keeper_fd in os.listdir(f"/proc/{run['keeper_pid']}/fd"):
        target = os.readlink(f"/proc/{run['keeper_pid']}/fd/{keeper_fd}")
        assert target == "/dev/null" or target.endswith("exit.json.new"), target
    size = host.log().stat().st_size
    until(lambda: host.log().stat().st_size > size + 1000, "the log's growth")
    with lock.exclusive(host.context("stop")):
        pass  # free: the keeper and the server do not hold it


def test_the_servers_signals_are_those_of_a_fresh_process(host):
    """The agent ignores SIGHUP and SIGPIPE and the keeper outlives more; none of that is handed on."""
    host.launch("a", argv=host.script("import time\ntime.sleep(60)"), wait=False)
    pid, _ = host.server()
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    ignored, blocked = int(status["SigIgn"], 16), int(status["SigBlk"], 16)
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1):
        assert not ignored & (1 << (number - 1)), number
    assert blocked == 0


def test_arguments_arrive_byte_for_byte(host):
    """No shell is between the profile and the server's argv."""
    words = ["a\\\\b'c", 'say "hi"', "$HOME `id` ; #", "", "ünïcode", "two\nlines"]
    argv = [*host.script("import json,sys\nprint(json.dumps(sys.argv[2:]))"), *words]
    host.launch("a", argv=argv, engine="openai", smoke=False)
    assert words == json.loads(host.log().read_text().splitlines()[0])


def test_the_server_sees_its_profile_and_its_mark(host):
    """Environment and working directory as the profile says, output unbuffered, the attempt's mark for descendants."""
    script = (
        "import os\nprint(os.getcwd(), *(os.environ[n] for n in ('COLOUR','DEPLOYCTL_ATTEMPT','PYTHONUNBUFFERED')))"
    )
    (host.root / "where").mkdir()
    host.launch("a", argv=host.script(script), env={"COLOUR": "blue"}, cwd=str(host.root / "where"), engine="openai")
    assert f"{host.root}/where blue {host.attempt()['marker']} 1" in host.log().read_text()


def test_a_twin_of_a_load_is_refused_and_a_running_server_is_named(host):
    """Two loads on one port would fight for the cards; nothing is started and nothing ended."""
    host.launch("a", wait=False, load_s=1.0)
    twin = host.launch("b")
    assert (twin["exit"], twin["error"]["kind"], twin["attempt"]) == (10, "twin", 1)
    assert host.ask("wait")["status"] == "ready"
    running = host.launch("b")
    assert (running["exit"], running["error"]["kind"]) == (10, "already-running")
    assert "attempt 1 (eagle3, a) is running" in running["error"]["message"]
    assert attempts.numbers(host.state) == [1]


def test_replace_stops_the_old_server_first_but_not_for_a_launch_that_cannot_start(host):
    """What can be known to fail is known before the server that runs is stopped."""
    host.launch("a", load_s=0.2)
    refused = host.launch("b", replace=True, argv=["/nowhere/python", "x"])
    assert refused["error"]["message"] == "/nowhere/python is not there, or not executable"
    assert host.launch("b", replace=True, cwd="/nowhere")["error"]["kind"] == "cannot-run"
    assert attempts.is_alive(host.attempt(1))
    result = host.launch("b", replace=True, load_s=0.2)
    assert (result["status"], result["attempt"]) == ("ready", 2)
    assert host.attempt(1)["verdict"]["state"] == "stopped"
    assert not attempts.is_alive(host.attempt(1))


def test_another_port_is_no_twin(host):
    """Two servers side by side are legal."""
    host.launch("a", load_s=0.2)
    host.port = free_port()
    assert host.launch("b", load_s=0.2, clean="none")["status"] == "ready"
    assert attempts.is_alive(host.attempt(1))
    assert attempts.is_alive(host.attempt(2))


def test_a_taken_port_names_its_holder(host):
    """Found before the load and not minutes after; the holder is not touched."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", host.port))
        listener.listen()
        result = host.launch("a")
    assert (result["exit"], result["error"]["kind"]) == (10, "port")
    assert f"pid {os.getpid()}" in result["error"]["message"]
    assert result["holder"]["pid"] == os.getpid()
    assert attempts.numbers(host.state) == []


def test_time_wait_is_not_taken(host):
    """Connections that a server has closed keep its port in TIME_WAIT; the next server binds it all the same."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", host.port))
        listener.listen(50)
        for _ in range(50):
            client = socket.create_connection(("127.0.0.1", host.port))
            server, _ = listener.accept()
            server.close()
            assert client.recv(1) == b""
            client.close()
    with socket.socket() as plain, pytest.raises(OSError, match="in use"):
        plain.bind(("127.0.0.1", host.port))
    assert host.launch("a", load_s=0.2)["status"] == "ready"


@pytest.mark.parametrize(
    ("words", "engine", "family", "address"),
    [
        (["--host", "0.0.0.0"], "sglang", socket.AF_INET, "127.0.0.1"),
        (["--host=::1"], "sglang", socket.AF_INET6, "::1"),
        (["--host", "localhost"], "sglang", socket.AF_INET, "127.0.0.1"),
        ([], "openai", socket.AF_INET, "127.0.0.2"),
        (["--host", "no-such-host.invalid"], "sglang", socket.AF_INET, "127.0.0.1"),
        (["--host", "9.9.9.9", "--host", "127.0.0.1"], "sglang", socket.AF_INET, "127.0.0.1"),
    ],
)
def test_every_address_that_the_server_will_use_is_tried(words, engine, family, address):
    """Wildcards, names with several addresses, IPv6, and the last --host of several, as argparse reads it."""
    with socket.socket(family) as listener:
        listener.bind((address, 0))
        listener.listen()
        with pytest.raises(Failure) as caught:
            launch.check_port(listener.getsockname()[1], ["server", *words], engine)
    assert caught.value.exit_code == 10


def test_a_port_held_on_another_address_is_free_for_this_one():
    """SGLang listens on 127.0.0.1 unless told otherwise."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.2", 0))
        listener.listen()
        launch.check_port(listener.getsockname()[1], ["server"], "sglang")
    launch.check_port(None, ["server"], "sglang")


def test_an_address_of_another_machine_is_refused():
    """uvicorn would find out after the load."""
    with pytest.raises(Failure, match="is no address of this machine") as caught:
        launch.check_port(free_port(), ["server", "--host", "192.0.2.1"], "sglang")
    assert caught.value.exit_code == 10


def test_a_port_that_this_user_may_not_bind():
    """Told as such, not as taken."""
    failure = launch._port_failure(80, OSError(errno.EACCES, "Permission denied"))
    assert (failure.exit_code, failure.message) == (10, "port 80 may not be bound by this user")


def test_a_holder_that_cannot_be_seen_is_said_so(monkeypatch):
    """In another network view of /proc nobody can name it."""
    failure = launch._port_failure(free_port(), OSError(errno.EADDRINUSE, "Address already in use"))
    assert "somebody" in failure.message
    monkeypatch.setattr(processes, "listening", lambda _port: (None, True))
    assert "another user" in launch._port_failure(1, OSError(errno.EADDRINUSE, "x")).message


@pytest.mark.parametrize("field", ["log_tag", "profile"])
@pytest.mark.parametrize("word", ["../../etc/passwd", ".hidden", "-x", "", "a b", "x" * 65])
def test_a_name_that_would_leave_the_log_folder_is_refused(host, field, word):
    """The agent does not trust its client with paths."""
    result = host.launch("a", **{field: word})
    assert (result["exit"], result["error"]["kind"]) == (2, "usage")


def test_a_regular_expression_that_is_none_is_refused_before_the_load(host):
    """It would otherwise fail after minutes."""
    result = host.launch("a", smoke_spec={"prompt": "x", "max_tokens": 4, "expect": "(paris"})
    assert result["exit"] == 2
    assert attempts.numbers(host.state) == []


def test_a_full_disk_for_logs_is_named_before_the_load(host, small_disk):
    """The reason and the path, and no server."""
    fill(small_disk)
    host.host["log_dir"] = str(small_disk)
    result = host.launch("a")
    assert result["exit"] == 1
    assert result["error"]["message"] == f"no space left on {small_disk}"
    assert attempts.numbers(host.state) == []


def test_a_log_folder_that_cannot_be_made_or_is_read_only(host, small_disk):
    """Named, with the reason."""
    file = host.root / "file"
    file.write_text("")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for folder, kind, words in (
        (file, "not-a-folder", f"a file is in the place of a folder: {file}"),
        (file / "logs", "not-a-folder", f"a file is in the place of a folder: {file}/logs"),
        (small_disk, "read-only", f"read-only file system: {small_disk}"),
        (small_disk / "logs", "read-only", f"read-only file system: {small_disk}/logs"),
    ):
        host.host["log_dir"] = str(folder)
        result = host.launch("a")
        assert (1, kind, words) == (result["exit"], result["error"]["kind"], result["error"]["message"])
    assert attempts.numbers(host.state) == []


def test_shared_memory_is_looked_at_and_only_ours_is_removed(host, small_disk):
    """Leftovers of our dead attempts go; another's stay; a full /dev/shm is named before the load."""
    host.host["shm_dir"] = str(small_disk)
    died = host.launch("a", argv=host.script("raise SystemExit(3)"), engine="openai")
    assert died["status"] == "crashed"
    pid = host.attempt()["run"]["pid"]
    (small_disk / f"sgl_shm_mm_{pid}_x").write_bytes(b"x" * 30000)
    os.utime(small_disk / f"sgl_shm_mm_{pid}_x", (0, 0))
    (small_disk / "keepme").write_text("other")
    assert host.launch("b", load_s=0.2)["status"] == "ready"
    assert [path.name for path in small_disk.iterdir()] == ["keepme"]
    host.ask("stop")
    fill(small_disk)
    full = host.launch("c")
    assert (full["exit"], full["error"]["kind"]) == (10, "shm-full")
    assert (small_disk / "keepme").exists()


def test_a_platform_without_shared_memory_is_no_reason(host):
    """There is no /dev/shm on macOS."""
    (host.root / "shm").rmdir()
    assert host.launch("a", load_s=0.2, clean="none")["status"] == "ready"


@pytest.mark.parametrize("wait", [True, False])
def test_a_program_that_cannot_be_executed_is_a_start_failure_at_once(host, wait):
    """Executable, but its interpreter is not there: exec fails under the keeper, which records the reason."""
    program = host.root / "server"
    program.write_text("#!/nowhere/python\n")
    program.chmod(0o755)
    result = host.launch("a", argv=[str(program)], wait=wait)
    assert (result["status"], result["exit"]) == ("crashed", 6)
    assert "cannot start the server" in result["crash"]["cause"]
    assert "No such file or directory" in result["crash"]["cause"]
    assert result["crash"]["exit_code"] == 127
    assert result["pid"] is None


def test_a_log_that_went_away_before_the_keeper_came(host, monkeypatch):
    """The keeper records why it could not start."""
    write = launch.write_file
    monkeypatch.setattr(launch, "write_file", lambda *words: (os.unlink(host.log()), write(*words)))
    result = host.launch("a")
    assert result["status"] == "crashed"
    assert "eagle3_a.log: No such file or directory" in result["crash"]["cause"]


def test_a_keeper_that_ends_without_a_word_is_not_waited_for(host, monkeypatch):
    """Its interpreter may be broken: said at once, and the attempt counts as crashed."""
    context = host.context("launch", **host.launch_args("a"))
    context.sources["keeper"] = "raise SystemExit(1)\n"
    with pytest.raises(Failure, match="keeper of attempt 1 ended without a word"):
        launch.launch(context)
    assert attempts.state_of(host.attempt()) == "crashed"
    context.sources["keeper"] = "import time\ntime.sleep(2)\n"
    monkeypatch.setattr(launch, "_START_S", 0.3)
    with pytest.raises(Failure, match=r"keeper of attempt 2 did not start within 0.3 s"):
        launch.launch(context)


def test_a_state_that_cannot_be_written_leaves_no_log(host, monkeypatch):
    """No attempt, no file."""

    def refuse(*_):
        raise Failure("no space left on x", kind="disk-full")

    context = host.context("launch", **host.launch_args("a"))
    write = context.state.write_json
    monkeypatch.setattr(context.state, "write_json", lambda v, *p: refuse() if p[-1] == "spec.json" else write(v, *p))
    with pytest.raises(Failure, match="no space"):
        launch.launch(context)
    assert list((host.root / "logs").iterdir()) == []


def test_a_log_name_that_cannot_be_created(host):
    """A folder that goes away between the look and the use is named."""
    with pytest.raises(Failure, match="nowhere"):
        launch._open_log("/nowhere/logs", "p", "t")


def test_ctrl_c_before_the_start_starts_nothing(host):
    """After it, the server is left alone; before it, there is nothing to leave."""
    wire = type(host.wire)()
    wire.cancelled.set()
    result = host.launch("a", wire=wire)
    assert (result["exit"], result["error"]["kind"]) == (130, "interrupted")
    assert attempts.numbers(host.state) == []


def test_the_hosts_own_gpu_mode_is_used_unless_the_command_says_otherwise(host, monkeypatch):
    """`clean: all` of hosts.yaml holds for launch too."""
    modes = []
    monkeypatch.setattr(launch.gpu, "clean_up", lambda _context, mode: modes.append(mode) or {"ended": []})
    host.launch("a", argv=host.script("pass"), engine="openai")
    host.launch("b", argv=host.script("pass"), engine="openai", clean="all")
    host.launch("c", argv=host.script("pass"), engine="openai", clean="none")
    assert modes == [None, "all"]


def test_a_known_bad_patch_is_said_at_launch(host, monkeypatch):
    """Loudly, and then it goes on."""
    layer = {"ref": "s/v1", "metadata": {"known_bad": "crashes above 8"}}
    release = {"number": 4, "base": 1, "patches": [layer]}
    monkeypatch.setattr(launch.releases, "current", lambda _state: release)
    result = host.launch("a", argv=host.script("pass"), engine="openai")
    assert [event["text"] for event in host.wire.named("warning")] == ["s/v1 is KNOWN BAD: crashes above 8"]
    assert (result["release"], result["patches"]) == (4, ["s/v1"])


def test_who_launched_is_in_the_audit_log(host):
    """The start, and its verdict."""
    host.launch("a", argv=host.script("raise SystemExit(3)"), engine="openai")
    entries = host.ask("audit")["entries"]
    assert [(entry["status"], entry["exit"]) for entry in entries] == [("started", 0), ("crashed", 6)]
