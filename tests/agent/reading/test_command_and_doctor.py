"""`run`, `copy` and `doctor`."""

import os
import socket
import stat

import pytest
from support import Box, MemoryWire, threshold

from deployctl.agent.main import Context, perform


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """Perform an operation in this process on a box of its own."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()

    def act(operation, blobs=None, host=None, **args):
        wire = MemoryWire(blobs)
        settings = {"name": "h", "state_dir": str(tmp_path / "state"), "log_dir": str(tmp_path / "logs")}
        settings["gpu"] = {"devices": str(tmp_path / "dev" / "nvidia[0-9]*")}
        request = {"op": operation, "args": args, "host": {**settings, **(host or {})}}
        result = perform(Context(request, wire, [], {}))
        result["events"] = wire.events
        return result

    act.root = tmp_path
    return act


def test_run_streams_and_reports_the_status(ask):
    """Output as it comes; a non-zero status is exit 1 with its number; env and cwd as asked."""
    good = ask("run", argv=["/bin/sh", "-c", "echo $A; pwd"], env={"A": "x"}, cwd=str(ask.root))
    assert (good["status"], good["exit_status"], good["output"]) == ("ok", 0, f"x\n{ask.root}\n")
    bad = ask("run", argv=["/bin/sh", "-c", "exit 3"])
    assert (bad["exit"], bad["error"]["kind"]) == (1, "run-failed")
    assert "exit status 3" in bad["error"]["message"]
    missing = ask("run", argv=["~/nope"])
    assert missing["error"]["kind"] == "cannot-run"
    python = ask("run", argv=["{python}", "-c", "print(1)"])
    assert python["output"] == "1\n"


def test_run_is_written_down_where_there_is_a_state(ask):
    """The audit log knows it; a host without state is left without."""
    ask("run", argv=["true"])
    assert not (ask.root / "state").exists()
    (ask.root / "state").mkdir()
    ask("run", argv=["true"])
    ask("copy", {"content": b"x"}, target="~/a")
    assert len((ask.root / "state" / "audit.jsonl").read_text().splitlines()) == 2


def test_run_has_a_deadline(ask):
    """Past it, the program and its children are ended."""
    result = ask("run", argv=["/bin/sh", "-c", "sleep 60"], timeout_s=0.3)
    assert result["error"]["kind"] == "timeout"


def test_copy(ask):
    """Atomically, with a mode; an existing file keeps its own; folders are refused."""
    result = ask("copy", {"content": b"one"}, target="sub/file")
    path = ask.root / "home" / "sub" / "file"
    assert (result["target"], path.read_bytes()) == (str(path), b"one")
    path.chmod(0o640)
    ask("copy", {"content": b"two"}, target=str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    ask("copy", {"content": b"three"}, target=str(path), mode=0o600)
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"three", 0o600)
    refused = ask("copy", {"content": b""}, target=str(path.parent))
    assert (refused["exit"], refused["error"]["kind"]) == (2, "usage")


def checks(result):
    return {entry["name"]: entry for entry in result["checks"]}


def test_doctor_changes_nothing_and_says_what_is_missing(ask):
    """No package: exit 1, named; no folder is made."""
    result = ask("doctor", ports=[])
    found = checks(result)
    assert (result["exit"], found["package"]["ok"], found["gpus"]["ok"]) == (1, False, None)
    assert found["journal"]["detail"] == "nothing was pushed yet"
    assert "sglang is not installed" in result["error"]["message"]
    assert not (ask.root / "state").exists()
    assert not (ask.root / "logs").exists()


def test_doctor_on_a_host_in_use(tmp_path):
    """Release, hold, open journal, ports: each in its line."""
    box = Box(tmp_path)
    box.push("a/v1", threshold(5))
    with socket.socket() as free, socket.create_server(("127.0.0.1", 0)) as taken:
        free.bind(("127.0.0.1", 0))
        ports = [
            {
                "port": taken.getsockname()[1],
                "argv": [],
                "url": f"http://127.0.0.1:{taken.getsockname()[1]}/",
                "profile": "t",
                "engine": "sglang",
            }
        ]
        found = checks(box.ask("doctor", ports=ports))
    assert found["package"]["ok"] is True
    assert found["journal"]["detail"] == "release 1"
    assert found["lock"]["detail"] == "free"
    assert found[f"port {ports[0]['port']}"]["ok"] is False
    box.ask("lock", action="acquire", message="mine")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").write_text("")
    found = checks(box.ask("doctor", ports=[]))
    assert found["lock"]["ok"] is None
    assert "mine" in found["lock"]["detail"]
    assert "1 device," in found["gpus"]["detail"]


def test_doctor_in_this_process(ask, monkeypatch):
    """A writable package, a busy lock, a push at work, logind that ends sessions: seen without changing them."""
    import fcntl

    from deployctl.agent import doctor

    package = ask.root / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    state = ask.root / "state"
    state.mkdir()
    (state / "journal.json").write_text('{"operation": "push"}')
    (state / "lock").write_text('{"operator": "bob", "command": "push"}')
    context_path = [str(package.parent)]
    shims = ask.root / "bin"
    shims.mkdir()
    (shims / "loginctl").write_text("#!/bin/sh\necho Linger=no\n")
    (shims / "loginctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{shims}:{os.environ['PATH']}")
    monkeypatch.setattr(doctor.os, "geteuid", lambda: 1000)
    settings = {"name": "h", "state_dir": str(state), "log_dir": str(ask.root / "logs"), "shm_dir": "/nonexistent"}
    settings["gpu"] = {"devices": "/nonexistent/x*"}
    with open(state / "lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        request = {"op": "doctor", "args": {"ports": []}, "host": settings}
        found = checks(doctor.doctor(Context(request, MemoryWire(), context_path, {})))
    assert found["lock"]["detail"] == "a command of bob is at work: push"
    assert found["journal"]["detail"] == "a push of bob is in progress"
    assert found["package"]["ok"] is True
    assert found["shared memory"]["ok"] is None
    assert found["session"]["ok"] is True
    real_open = open

    def fake_open(path, *args, **kwargs):
        if path == "/etc/systemd/logind.conf":
            conf = ask.root / "logind.conf"
            conf.write_text("[Login]\nKillUserProcesses=yes\n")
            return real_open(conf, *args, **kwargs)
        return real_open(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", fake_open)
    ok, detail, hint = doctor._session(Context(request, MemoryWire(), context_path, {}))
    assert (ok, hint.rpartition(" ")[0]) == (False, "loginctl enable-linger")
    assert "KillUserProcesses" in detail
