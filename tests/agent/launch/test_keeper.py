"""The keeper's parts, called in this process; as a process it is in every other test here."""

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading

import pytest

from deployctl.agent import keeper, processes


@pytest.fixture
def own_process():
    """Signal handlers, mask and reaping of this process as they were."""
    handlers = {number: signal.getsignal(number) for number in (1, 2, 3, 10, 12, 13, 15)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


def attempt(tmp_path, argv, **changes):
    """An attempt directory as launch leaves it."""
    log = tmp_path / "x.log"
    log.touch()
    spec = {
        "argv": argv, "cwd": str(tmp_path), "env": {}, "log": str(log), "boot_id": processes.boot_id(), "marker": "k:1",
    }  # fmt: skip
    spec.update(changes)
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    return tmp_path


def record(folder, name):
    return json.loads((folder / name).read_text())


def test_a_server_is_kept_to_its_end(tmp_path, own_process):
    """Its record before its end, its exit after it, its output in the log."""
    script = "import os,sys; print('out'); print('err', file=sys.stderr); print(os.environ['A']); sys.exit(9)"
    keeper.keep(str(attempt(tmp_path, [sys.executable, "-c", script], env={"A": "profile's"})))
    assert sorted((tmp_path / "x.log").read_text().split("\n")) == sorted(["out", "err", "profile's", ""])
    run, ended = record(tmp_path, "run.json"), record(tmp_path, "exit.json")
    assert (ended["status"], ended["signal"]) == (9, None)
    assert run["keeper_pid"] == os.getpid()
    assert run["keeper_start"] == processes.start_time(os.getpid())
    assert run["pgid"] == run["pid"]
    assert run["at"] <= ended["at"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"argv": ["/nowhere/python"]}, "/nowhere/python: No such file or directory"),
        ({"cwd": "/nowhere"}, "/nowhere: No such file or directory"),
        ({"argv": ["/etc"]}, "/etc: Permission denied"),
        ({"argv": ["nul\0byte"]}, "nul\0byte: embedded null byte"),
        ({"log": "/nowhere/x.log"}, "/nowhere/x.log: No such file or directory"),
    ],
)
def test_a_start_that_fails_is_recorded_with_its_reason(tmp_path, own_process, changes, reason):
    """Program, folder, permission, log: run.json says failed, exit.json stands already."""
    keeper.keep(str(attempt(tmp_path, **{"argv": ["x"], **changes})))
    assert record(tmp_path, "run.json")["failed"] == reason
    assert record(tmp_path, "run.json")["pid"] is None
    assert (record(tmp_path, "exit.json")["status"], record(tmp_path, "exit.json")["reason"]) == (127, reason)
    if "log" not in changes:
        assert "cannot start the server" in (tmp_path / "x.log").read_text()


def test_a_full_disk_at_the_start_is_named():
    """In the words of the contract."""
    error = OSError(errno.ENOSPC, "No space left on device", "/state/exit.json.new")
    assert keeper._reason(error, "python") == "no space left on /state/exit.json.new"
    assert keeper._reason(OSError(errno.ENOENT, "gone", b"/b"), "python") == "/b: gone"


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_the_exit_is_recorded_though_the_disk_is_full(small_disk):
    """A server that fills the disk with its log dies of it: its record was reserved before."""
    path = str(small_disk / "exit.json")
    handle = keeper.reserve(path)
    with contextlib.suppress(OSError), open(small_disk / "log", "wb", buffering=0) as log:
        while True:
            log.write(b"x" * 4096)
    with pytest.raises(OSError, match="No space"):
        keeper.write_json(str(small_disk / "other.json"), {"a": "b" * 5000})
    assert keeper.write_reserved(handle, path, {"status": 1, "signal": None})
    os.close(handle)
    assert json.loads((small_disk / "exit.json").read_text()) == {"status": 1, "signal": None}


def test_a_record_that_cannot_be_written_is_tried_again(tmp_path):
    """Until its patience ends; and it comes when the folder is back."""
    folder = tmp_path / "attempt"
    folder.mkdir()
    handle = keeper.reserve(str(folder / "exit.json"))
    folder.rename(tmp_path / "away")
    assert not keeper.write_reserved(handle, str(folder / "exit.json"), {}, patience_s=0.0)
    threading.Timer(0.1, (tmp_path / "away").rename, [folder]).start()
    assert keeper.write_reserved(handle, str(folder / "exit.json"), {"status": 3}, patience_s=30)
    os.close(handle)
    assert record(folder, "exit.json") == {"status": 3}


def test_a_record_that_nobody_will_read_is_given_up(tmp_path, monkeypatch):
    """The attempt's folder was removed for good: no keeper stays behind for an hour."""
    monkeypatch.setattr(keeper, "_FOLDER_PATIENCE_S", 0.2)
    folder = tmp_path / "attempt"
    folder.mkdir()
    handle = keeper.reserve(str(folder / "exit.json"))
    (folder / "exit.json.new").unlink()
    folder.rmdir()
    written = []
    writer = threading.Thread(
        target=lambda: written.append(keeper.write_reserved(handle, str(folder / "exit.json"), {}, patience_s=3600.0)),
        daemon=True,
    )
    writer.start()
    writer.join(30)
    os.close(handle)
    assert [False] == written


def test_orphans_are_reaped_until_the_server_ends(own_process):
    """Other children come and go; the server's own status is the one that counts."""
    keeper.become_subreaper()
    script = "import os,time\nif os.fork()==0:\n os._exit(5)\ntime.sleep(0.2)\nos._exit(4)"
    other = subprocess.Popen([sys.executable, "-c", "pass"])
    server = subprocess.Popen([sys.executable, "-c", script])
    ended = []
    keeper.await_end(server.pid, ended.append)
    assert [(entry["status"], entry["signal"]) for entry in ended] == [(4, None)]
    # Their Popens cannot ask any more: the keeper has reaped them.
    server.returncode = other.returncode = 0


def test_a_server_that_somebody_else_reaped_leaves_no_record():
    """No status is invented."""
    ended = []
    keeper.await_end(2**22 + 1, ended.append)
    assert ended == []


@pytest.mark.parametrize(
    ("code", "status", "name"),
    [
        ("import os; os._exit(0)", 0, None),
        ("import os; os._exit(255)", 255, None),
        ("import os; os.kill(os.getpid(), 9)", None, "SIGKILL"),
        (f"import os; os.kill(os.getpid(), {signal.SIGRTMIN + 3})", None, f"signal {signal.SIGRTMIN + 3}"),
    ],
)
def test_a_wait_status_is_read(code, status, name):
    """Exit statuses and signals, those without a name too."""
    child = subprocess.Popen([sys.executable, "-c", code])
    _, waited = os.waitpid(child.pid, 0)
    child.returncode = 0
    ended = keeper.ending(waited)
    assert (ended["status"], ended["signal"]) == (status, name)


def test_the_environment_is_the_sessions_and_the_profiles():
    """The profile wins; output is not buffered unless somebody wants it so; the mark is ours and survives a title."""
    spec = {"env": {"A": "2", "DEPLOYCTL_ATTEMPT": "forged"}, "marker": "m:1"}
    merged = keeper.environment_of(spec, {"A": "1", "B": "3"})
    assert merged == {"A": "2", "B": "3", "PYTHONUNBUFFERED": "1", "SPT_NOENV": "1", "DEPLOYCTL_ATTEMPT": "m:1"}
    assert keeper.environment_of({"env": {"PYTHONUNBUFFERED": ""}, "marker": "m"}, {})["PYTHONUNBUFFERED"] == ""


def test_start_times_are_those_of_the_agent(monkeypatch):
    """(pid, start) must mean the same to both; without /proc, `ps` tells."""
    assert keeper.start_of(os.getpid()) == processes.start_time(os.getpid())

    def no_proc(*_words, **_options):
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", no_proc)
    told = keeper.start_of(os.getpid())
    assert isinstance(told, str)
    assert ":" in told
    assert keeper.start_of(2**22 + 1) is None
    monkeypatch.setenv("PATH", "/nowhere")
    assert keeper.start_of(os.getpid()) is None


def test_a_platform_without_prctl_is_no_reason_to_fail(monkeypatch):
    """macOS: init reaps orphans."""

    def nothing(*_):
        raise OSError("no libc by that name")

    monkeypatch.setattr(ctypes, "CDLL", nothing)
    keeper.become_subreaper()


def test_nothing_is_inherited_but_what_a_fresh_process_has(tmp_path, own_process):
    """Umask and limits are the user's; the keeper changes neither."""
    before = os.umask(0o027)
    try:
        script = "import os,resource; print(oct(os.umask(0)), resource.getrlimit(resource.RLIMIT_NOFILE))"
        keeper.keep(str(attempt(tmp_path, [sys.executable, "-c", script])))
    finally:
        os.umask(before)
    assert (tmp_path / "x.log").read_text() == f"0o27 {resource.getrlimit(resource.RLIMIT_NOFILE)}\n"
