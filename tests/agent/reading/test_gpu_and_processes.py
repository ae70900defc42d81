"""GPUs with real holders of device files and shims of the tools; processes by pid and start time."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from gpu_host import GpuHost
from sshd_rig import until
from support import MemoryWire

from deployctl.agent import gpu, lock, processes, tools
from deployctl.agent.failure import Failure
from deployctl.agent.main import Context


@pytest.fixture
def host(tmp_path, monkeypatch):
    host = GpuHost(tmp_path, monkeypatch)
    yield host
    host.end()


def test_a_free_gpu_is_clean(host):
    """Nobody holds it, its memory is back."""
    result = host.ask()
    assert (result["status"], result["ended"]) == ("clean", [])
    assert result["gpus"] == [{"index": 0, "name": "NVIDIA H200", "used_mib": 4, "total_mib": 143771}]
    assert result["tools"] == {"fuser": "ok", "nvidia-smi": "ok"}


@pytest.mark.parametrize("tool", ["fuser", "/proc"])
def test_a_foreign_holder_is_named_and_left_alone(host, tool):
    """User, pid, age, command; exit 10; `all` ends it."""
    if tool == "/proc":
        host.without("fuser")
    child = host.holder()
    result = host.ask()
    assert (result["exit"], result["error"]["kind"]) == (10, "foreign-holders")
    assert f"pid {child.pid} (root" in result["error"]["message"]
    assert child.poll() is None
    report = host.ask("status")
    assert [holder["pid"] for holder in report["holders"]] == [child.pid]
    if tool == "/proc":
        assert "fuser is not installed" in result["tools"]["fuser"]
        assert "nvidia-smi" in result["tools"] or result["gpus"] == []
    result = host.ask(all=True)
    assert [entry["pid"] for entry in result["ended"]] == [child.pid]
    assert child.wait(5) == -signal.SIGTERM


def test_our_orphans_are_ended_also_when_they_ignore_sigterm(host):
    """Marked by this state directory, launcher dead: SIGKILL after the grace."""
    child = host.holder(lock.machine_identity(host.state) + ":7", ignore_term=True)
    other = host.holder("another:7", argv0="nvidia-persistenced")
    result = host.ask()
    assert [entry["pid"] for entry in result["ended"]] == [child.pid]
    assert [entry["pid"] for entry in result["spared"]] == [other.pid]
    assert child.wait(5) == -signal.SIGKILL
    assert other.poll() is None


def test_memory_that_comes_back_late(host):
    """Waited for, and said so."""
    counter = host.root / "calls"
    host.tool(
        "nvidia-smi",
        f'case "$1" in *compute-apps*) ;; *) echo x >> {counter}; n=$(wc -l < {counter});'
        ' if [ "$n" -lt 4 ]; then echo "0, NVIDIA H200, 141000, 143771"; else echo "0, NVIDIA H200, 4, 143771"; fi;; esac',
    )
    host.host["limits"]["gpu_memory_s"] = 20
    result = host.ask()
    assert result["status"] == "clean"
    assert any("141000 MiB" in str(event.get("text")) for event in host.wire.events)


def test_memory_that_never_comes_back(host):
    """Exit 10, with the number and the time."""
    host.smi("0, NVIDIA H200, 141000, 143771", clients="4711, 140000\\n")
    result = host.ask()
    assert result["exit"] == 10
    assert "GPU 0 still 141000 MiB after" in result["error"]["message"]


def test_tools_that_hang_or_fail_are_cut_off_and_named(host):
    """Never read as clean in silence."""
    host.host["limits"]["tool_s"] = 0.3
    host.tool("nvidia-smi", "exec sleep 60")
    result = host.ask()
    assert "no answer within" in result["tools"]["nvidia-smi"]
    host.tool("nvidia-smi", "echo 'NVIDIA-SMI has failed' >&2; exit 9")
    result = host.ask()
    assert "exit status 9" in result["tools"]["nvidia-smi"]
    assert "NVIDIA-SMI has failed" in result["tools"]["nvidia-smi"]
    (host.bin / "nvidia-smi").write_text("no program")
    assert "cannot be run" in tools.Tool([str(host.bin / "nvidia-smi")]).problem


def test_no_devices_and_no_tools(host):
    """A CPU host: clean, and what is missing is said."""
    host.device.unlink()
    host.without("nvidia-smi")
    result = host.ask()
    assert result["devices"] == []
    assert "not installed" in result["tools"]["nvidia-smi"]


def test_shared_memory_leftovers(host):
    """Those of our dead processes go; others' stay."""
    child = subprocess.Popen(["true"])
    child.wait()
    spec = {"attempt": 1, "marker": "x:1", "machine": processes.machine_id(), "at": time.time()}
    spec.update(log_tag="a", profile="p", log="l", boot_id=processes.boot_id(), patches=[])
    host.state.write_json(spec, "attempts", 1, "spec.json")
    host.state.write_json({"pid": child.pid, "start": 1, "boot_id": processes.boot_id()}, "attempts", 1, "run.json")
    shm = host.root / "shm"
    (shm / f"sgl_shm_mm_{child.pid}_x").write_text("x")
    (shm / "keepme").write_text("x")
    (shm / f"folder_{child.pid}").mkdir()
    result = host.ask()
    assert result["shm_removed"] == [f"sgl_shm_mm_{child.pid}_x"]
    assert sorted(os.listdir(shm)) == [f"folder_{child.pid}", "keepme"]
    host.host["shm_dir"] = "/nonexistent"
    assert host.ask()["shm_removed"] == []


def test_a_process_that_will_not_end(host, monkeypatch):
    """Said by pid and state; exit 10."""
    child = host.holder(lock.machine_identity(host.state) + ":7")
    monkeypatch.setattr(processes, "send", lambda _process, _number: True)
    host.host["limits"].update(term_grace_s=0.1, kill_patience_s=0.1)
    result = host.ask()
    assert (result["exit"], result["error"]["kind"]) == (10, "not-stopped")
    assert f"pid {child.pid}" in result["error"]["message"]


# -- processes ---------------------------------------------------------------------------------------------------------


def test_names_with_parentheses_and_spaces(tmp_path):
    """The kernel's stat line is read from its last parenthesis."""
    program = tmp_path / "a) b (c"
    program.symlink_to(shutil.which("sleep"))
    child = subprocess.Popen([program, "60"])
    try:
        found = until(lambda: processes.snapshot([child.pid]).get(child.pid), what="the process")
        assert (found.pid, found.ppid) == (child.pid, os.getpid())
        assert processes.alive(child.pid, found.start)
        assert not processes.alive(child.pid, found.start + 1)
        assert child.pid in {process.pid for process in processes.descendants(os.getpid())}
    finally:
        child.kill()
    # A zombie counts as gone, before it is reaped.
    until(lambda: processes.start_time(child.pid) is None, what="the end")
    assert child.pid not in processes.snapshot()
    child.wait()


def test_another_process_with_the_same_pid_is_never_signalled():
    """The start time must match."""
    child = subprocess.Popen(["sleep", "60"])
    found = processes.snapshot([child.pid])[child.pid]
    assert not processes.send(found._replace(start=found.start + 1), signal.SIGKILL)
    assert child.poll() is None
    assert processes.send(found, signal.SIGKILL)
    child.wait()
    assert not processes.send(found, signal.SIGKILL)


def test_ourselves_and_our_ancestors_are_spared():
    """Asked to end them, nothing happens."""
    mine = processes.snapshot([os.getpid(), os.getppid()])
    assert {os.getpid(), os.getppid(), 1} <= processes.spared()
    assert processes.end(list(mine.values()), 0.1, 0.1) == []
    assert os.getpid() in processes.snapshot()


def test_ending_tells_when_it_needs_force():
    """SIGTERM first, SIGKILL after the grace, with a word; zero grace kills at once."""
    script = "import signal,time;signal.signal(signal.SIGTERM,signal.SIG_IGN);print(1,flush=True);time.sleep(60)"
    said: list[str] = []
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        found = list(processes.snapshot([child.pid]).values())
        assert processes.end(found, 0.2, 5, said.append) == []
        assert said == ["1 process did not end within 0.2 s: SIGKILL"]
        assert child.wait() == -signal.SIGKILL
    with subprocess.Popen(["sleep", "60"]) as child:
        assert processes.end(list(processes.snapshot([child.pid]).values()), 0, 5) == []
        assert child.wait() == -signal.SIGKILL


def test_who_listens(monkeypatch):
    """The holder of a port; nobody; and where it cannot be seen."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        holder, known = processes.listening(port)
        assert (holder.pid, known) == (os.getpid(), True)
    assert processes.listening(port) == (None, False)


def test_without_proc_ps_is_asked(monkeypatch):
    """macOS and others: start times to the second, environments of our own processes, zombies left out."""
    monkeypatch.setattr(processes, "_LINUX", False)
    child = subprocess.Popen(["sleep", "60"], env=dict(os.environ, DEPLOYCTL_ATTEMPT="m:1"))
    try:
        found = until(lambda: processes.snapshot([child.pid]).get(child.pid), what="ps")
        assert found.ppid == os.getpid()
        assert found.command.startswith("sleep")
        assert processes.start_time(child.pid) == found.start
        assert processes.start_time(2**22 - 1) is None
        assert os.getpid() in processes.snapshot()
    finally:
        child.kill()
        child.wait()
    assert processes._elapsed_s("2-03:04:05") == 2 * 86400 + 3 * 3600 + 4 * 60 + 5
    assert processes._command_output(["/nonexistent"]) == ""
    monkeypatch.setattr(processes, "_command_output", lambda argv: f"{os.getpid()}\n" if argv[0] == "lsof" else "")
    assert processes.listening(1) == (None, False)


def test_machine_and_boot(monkeypatch):
    """Known on every platform, whatever files there are."""
    assert processes.machine_id()
    assert processes.boot_id() == processes.boot_id()
    real_open = open

    def no_files(path, *args, **kwargs):
        if "machine-id" in str(path) or "boot_id" in str(path):
            raise FileNotFoundError(path)
        return real_open(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", no_files)
    assert processes.machine_id() == os.uname().nodename
    assert processes.boot_id()


def test_the_failure_carries_what_was_found(host):
    """The result of a refused clean still lists holders and cards."""
    host.holder()
    with pytest.raises(Failure) as caught:
        gpu.clean_up(Context({"op": "clean", "host": host.host}, MemoryWire(), [], {}))
    assert caught.value.fields["foreign"]
