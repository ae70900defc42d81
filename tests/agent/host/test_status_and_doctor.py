"""Status tells every part that it can, whatever is broken; doctor and the playbook's own steps."""

import json
import os
import pwd
import socket
import stat
import subprocess
import time

import pytest
from launch_host import until
from support import Box, perform, threshold

from deployctl.agent import doctor, gpu, processes


def test_a_damaged_record_hides_no_server(host):
    """One bad file is a problem in its place; the server that runs is still shown, and its processes are still ours."""
    host.launch("a", argv=host.script("import time\nprint('up', flush=True)\ntime.sleep(300)"), wait=False)
    pid, _ = host.server()
    for part in ("spec", "verdict"):
        folder = host.root / "state dir" / "attempts" / {"spec": "7", "verdict": "8"}[part]
        folder.mkdir()
        (folder / "spec.json").write_text("{}" if part == "verdict" else "{torn")
        (folder / f"{part}.json").write_text("{torn")
    result = host.ask("status")
    assert pid == result["server"]["pid"]
    assert [pid] == [process.pid for process, _ in gpu.ours(host.state).values()]
    assert 2 == len([problem for problem in result["problems"] if "damaged" in problem])
    assert [] == result["orphans"]
    (host.root / "state dir" / "attempts" / "7" / "spec.json").unlink()
    (host.root / "state dir" / "attempts" / "8" / "verdict.json").write_text("{}")
    # A record that lacks what it should hold: said, and not fatal either.
    result = host.ask("status", check=True)
    assert result["problems"]
    assert 0 == result["exit"]


def test_a_part_that_fails_is_said_in_its_place(tmp_path, monkeypatch):
    """GPUs that cannot be read: the release and the drift are still told."""
    box = Box(tmp_path)
    box.push("a/v1", threshold(5))

    def broken(_context):
        raise ValueError("no number")

    monkeypatch.setattr(gpu, "report", broken)
    (box.package / "srt" / "args.py").write_text("edited = 1\n")
    result = perform(box, "status")
    assert ["ValueError: no number"] == result["problems"]
    assert (1, ["a/v1"], ["srt/args.py"]) == (
        result["release"],
        result["patches"],
        [entry["path"] for entry in result["drift"]],
    )
    assert 9 == perform(box, "status", check=True)["exit"]
    (box.root / "state dir" / "current.json").write_text("{torn")
    result = perform(box, "status")
    assert result["release"] is None
    assert "current.json is damaged" in result["problems"][0]


def test_status_of_a_new_host_leaves_nothing_behind(host):
    """Reading makes no state."""
    result = host.ask("status")
    assert (None, None, [], []) == (result["release"], result["server"], result["orphans"], result["holders"])
    assert not os.path.exists(host.state.root)


def test_status_check_of_a_crash(host):
    """Exit 6 when the newest attempt crashed, 0 once another runs."""
    host.launch("a", argv=host.script("raise SystemExit(1)"))
    result = host.ask("status", check=True)
    assert (6, "crashed") == (result["exit"], result["error"]["kind"])
    assert "crashed" == result["attempt"]["state"]
    assert 0 == host.ask("status")["exit"]


def test_a_crash_that_nobody_watched_has_a_cause(host):
    """Status reads the log where no watcher has; it writes no verdict of its own."""
    host.launch("a", argv=host.script("raise ValueError('not this way')"), wait=False)
    until(lambda: host.attempt()["exit"])
    assert "ValueError: not this way" == host.ask("status")["attempt"]["cause"]
    assert (host.attempt()["verdict"] or {}).get("state") != "crashed"


def test_what_a_load_is_at(host, monkeypatch):
    """The phase from the log; ready as soon as it is, also when nobody watched; unknown where it does not answer."""
    host.launch("a", load_s=0.1, wait=False)
    until(lambda: (host.ask("status")["server"] or {}).get("state") == "ready", "ready")
    server = host.ask("status")["server"]
    assert (1, "a", "eagle3", host.port, None) == tuple(
        server[key] for key in ("attempt", "log_tag", "profile", "port", "phase")
    )
    assert f"http://127.0.0.1:{host.port}" == server["url"]
    assert 0 < server["uptime_s"] < 120
    os.rename(host.log(), str(host.log()) + ".moved")
    server = host.ask("status")["server"]
    assert ("loading", "init") == (server["state"], server["phase"])
    host.ask("stop")
    host.launch("b", argv=host.script("import time\ntime.sleep(300)"), engine="openai", wait=False)
    host.server()
    server = host.ask("status")["server"]
    assert ("loading", 2) == (server["state"], server["attempt"])


class Limits:
    """A context that sets no bounds."""

    def limit(self, _name, default):
        return default


def checks(result):
    return {entry["name"]: entry for entry in result["checks"]}


def test_doctor_tells_our_own_server_from_a_stranger(host):
    """A port that our server holds is no fault."""
    host.launch("a", load_s=0.1)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        other = stranger.getsockname()[1]
        ports = [{"port": port, "argv": [], "engine": "sglang", "profile": "p"} for port in (host.port, other)]
        found = checks(host.ask("doctor", ports=ports))
    assert (None, "our attempt 1 (a) serves there") == tuple(
        found[f"port {host.port}"][key] for key in ("ok", "detail")
    )
    assert found[f"port {other}"]["ok"] is False
    assert f"pid {os.getpid()}" in found[f"port {other}"]["detail"]


@pytest.fixture
def box(tmp_path):
    return Box(tmp_path)


@pytest.fixture
def disk(tmp_path):
    """A small file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128m,nr_inodes=20", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_doctor_on_disks(box, disk):
    """Full, without inodes, read-only, noexec, a file in the way: each named with what to do, nothing left behind."""
    box.host["log_dir"] = str(disk / "logs")
    box.host["shm_dir"] = str(disk)
    assert checks(perform(box, "doctor"))["logs"]["ok"] is True
    assert [] == os.listdir(disk)
    assert checks(perform(box, "doctor"))["shared memory"]["ok"] is None
    (disk / "fill").write_bytes(b"x" * (120 << 20))
    found = checks(perform(box, "doctor"))
    assert (False, f"{disk}/logs (8 MiB free)") == (found["logs"]["ok"], found["logs"]["detail"])
    assert found["shared memory"]["ok"] is False
    (disk / "fill").unlink()
    for number in range(19):
        (disk / str(number)).write_text("")
    assert f"{disk}/logs: no inodes left" == checks(perform(box, "doctor"))["logs"]["detail"] or (
        "no space left" in checks(perform(box, "doctor"))["logs"]["detail"]
    )
    for number in range(19):
        (disk / str(number)).unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    found = checks(perform(box, "doctor"))
    assert (False, f"read-only file system: {disk}") == (found["logs"]["ok"], found["logs"]["detail"])
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    (disk / "logs").write_text("")
    found = checks(perform(box, "doctor"))
    assert (False, f"{disk}/logs is no folder") == (found["logs"]["ok"], found["logs"]["detail"])


@pytest.mark.parametrize(
    ("options", "ok", "said", "hint"),
    [
        ("ro", False, "read-only file system: ", "remount it writable"),
        ("size=1m", False, "MiB free there", "df -h"),
        ("noexec", None, "mounted noexec", "remount it with exec"),
    ],
)
def test_doctor_on_the_packages_disk(box, options, ok, said, hint):
    """What a push would meet, before it does."""
    copy = box.root / "copy"
    os.rename(box.package, copy)
    box.package.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options.replace("ro", "size=200m"), "tmpfs", str(box.package)], check=True
    )
    try:
        subprocess.run(["cp", "-a", f"{copy}/.", str(box.package)], check=True)
        if options == "ro":
            subprocess.run(["mount", "-o", "remount,ro", str(box.package)], check=True)
        found = checks(perform(box, "doctor"))["package"]
    finally:
        subprocess.run(["umount", str(box.package)], check=True)
    assert ok == found["ok"]
    assert said in found["detail"]
    assert hint in found["hint"]


def test_doctor_and_the_clock(box):
    """A clock that was set back makes ages and times wrong: said, and no failure."""
    assert checks(perform(box, "doctor"))["clock"]["ok"] is True
    (box.root / "state dir" / "attempts" / "1").mkdir(parents=True)
    spec = {"attempt": 1, "log_tag": "a", "profile": "p", "log": "/nowhere", "patches": [], "at": time.time() + 900}
    spec.update(marker="x:1", machine=processes.machine_id(), boot_id=processes.boot_id())
    (box.root / "state dir" / "attempts" / "1" / "spec.json").write_text(json.dumps(spec))
    found = checks(perform(box, "doctor"))["clock"]
    assert found["ok"] is None
    assert "s before our latest record" in found["detail"]


def test_a_check_that_fails_itself_hides_no_other(box, monkeypatch):
    """Whatever its error."""

    def broken(_context):
        raise RuntimeError("odd")

    monkeypatch.setattr(doctor, "_session", broken)
    found = checks(perform(box, "doctor"))
    assert (False, "RuntimeError: odd") == (found["session"]["ok"], found["session"]["detail"])
    assert found["clock"]["ok"] is True


@pytest.mark.parametrize(
    ("files", "ok"),
    [
        ({}, True),
        ({"logind.conf": "[Login]\n#KillUserProcesses=yes\n"}, True),
        ({"logind.conf": "[Login]\nKillUserProcesses=yes\n"}, False),
        ({"logind.conf": "[Login]\nKillUserProcesses=yes\nKillExcludeUsers=root {user}\n"}, True),
        ({"logind.conf": "[Login]\nKillUserProcesses=yes\nKillOnlyUsers=guest\n"}, True),
        ({"logind.conf": "[Login]\nKillUserProcesses=yes\n", "usr/50.conf": "[Login]\nKillUserProcesses=no\n"}, True),
        ({"usr/50.conf": "KillUserProcesses=no\n", "etc/50.conf": "KillUserProcesses=on\n"}, False),
        ({"usr/60.conf": "KillUserProcesses=no\n", "etc/50.conf": "KillUserProcesses=on\n"}, True),
    ],
)
def test_who_is_ended_at_logout(tmp_path, monkeypatch, files, ok):
    """By logind's settings with their drop-ins; a user that lingers is safe."""
    user = pwd.getpwall()[1].pw_name
    monkeypatch.setattr(os, "geteuid", lambda: pwd.getpwnam(user).pw_uid)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text.format(user=user))
    monkeypatch.setattr(doctor, "_LOGIND", str(tmp_path / "logind.conf"))
    monkeypatch.setattr(doctor, "_LOGIND_FOLDERS", (str(tmp_path / "usr"), str(tmp_path / "etc")))
    tools = tmp_path / "bin"
    tools.mkdir()
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    for lingers in ("no", "yes"):
        (tools / "loginctl").write_text(f"#!/bin/sh\necho Linger={lingers}\n")
        (tools / "loginctl").chmod(0o755)
        found, _, hint = doctor._session(Limits())
        assert (ok or lingers == "yes") == found
        assert ("" if found else f"loginctl enable-linger {user}") == hint
    monkeypatch.setenv("PATH", "/nonexistent")
    assert doctor._session(Limits())[0] is True


def test_a_user_without_a_name(tmp_path, monkeypatch):
    """Containers run as numbers."""
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    monkeypatch.setattr(doctor, "_LOGIND", str(tmp_path / "logind.conf"))
    (tmp_path / "logind.conf").write_text("KillUserProcesses=yes\n")
    assert "loginctl enable-linger 54321" == doctor._session(Limits())[2]


def copied(box, target, content=b"new", **args):
    return perform(box, "copy", {"content": content}, target=str(target), **args)


def test_copy_keeps_the_owner_and_makes_readable_folders(box, monkeypatch):
    """As root over a user's file: it stays the user's; new folders are for everybody whom the umask allows."""
    monkeypatch.setenv("HOME", str(box.home))
    target = box.home / "a" / "b" / "file"
    assert "ok" == copied(box, target)["status"]
    assert (0o755, 0o644) == tuple(stat.S_IMODE(os.stat(path).st_mode) for path in (target.parent, target))
    os.chown(target, 1234, 1235)
    target.chmod(0o4755)
    copied(box, "a/b/file", b"newer")
    found = target.stat()
    assert (b"newer", 1234, 1235, 0o4755) == (
        target.read_bytes(),
        found.st_uid,
        found.st_gid,
        stat.S_IMODE(found.st_mode),
    )
    monkeypatch.setattr(os, "chown", lambda *_: (_ for _ in ()).throw(PermissionError(1, "not root")))
    assert "ok" == copied(box, target, b"once more")["status"]
    assert b"once more" == target.read_bytes()


def test_copy_goes_through_a_link(box):
    """The file it names is written, the link stays."""
    real, link = box.home / "real", box.home / "link"
    real.write_text("old")
    link.symlink_to(real)
    copied(box, link)
    assert (True, b"new") == (link.is_symlink(), real.read_bytes())


def test_copy_refuses_what_is_no_file(box, monkeypatch):
    """A device would be replaced by a file; a name with a slash at its end means a folder."""
    monkeypatch.setenv("HOME", str(box.home))
    os.mkfifo(box.home / "pipe")
    for target, said in ((box.home / "pipe", "no regular file"), ("folder/", "is a folder"), (box.home, "is a folder")):
        result = copied(box, target)
        assert (2, True) == (result["exit"], said in result["error"]["message"])
    assert stat.S_ISFIFO(os.stat(box.home / "pipe").st_mode)
    (box.home / "file").write_text("x")
    result = copied(box, box.home / "file" / "below")
    assert 1 == result["exit"]
    assert str(box.home / "file" / "below") in result["error"]["message"]


def test_a_run_that_fails_is_in_the_audit_log_too(box, monkeypatch):
    """Past its deadline or not even started: who asked for it is written down."""
    monkeypatch.setenv("HOME", str(box.home))
    (box.root / "state dir").mkdir()
    assert "timeout" == perform(box, "run", argv=["sleep", "60"], timeout_s=0.2)["error"]["kind"]
    assert "cannot-run" == perform(box, "run", argv=["/nonexistent"])["error"]["kind"]
    assert "cannot-run" == perform(box, "run", argv=["true"], cwd="/nonexistent")["error"]["kind"]
    entries = perform(box, "audit")["entries"]
    assert ["run", "run", "run"] == [entry["operation"] for entry in entries]
    assert "did not end within 0.2 s" in entries[0]["error"]


def test_megabytes_of_output(box, monkeypatch):
    """Streamed in bounds, never stuck; the end is in the result."""
    monkeypatch.setenv("HOME", str(box.home))
    result = perform(box, "run", argv=["{python}", "-c", "print('x' * 3_000_000 + 'end')"])
    assert ("ok", 0, True) == (result["status"], result["exit_status"], result["output"].endswith("xend\n"))
    assert sum(len(event.get("text") or "") for event in box.events) < 1 << 20


def test_nothing_that_run_started_is_left(box, monkeypatch):
    """Cancelled by the client: its whole group ends."""
    monkeypatch.setenv("HOME", str(box.home))
    box.on_event = lambda wire, event: event["event"] == "output" and wire.cancelled.set()
    result = perform(box, "run", argv=["/bin/sh", "-c", "sleep 300 & echo $$; wait"])
    assert (130, "interrupted") == (result["exit"], result["error"]["kind"])
    group = int(result["output"])
    assert [] == [process for process in processes.snapshot().values() if process.pgid == group]


def test_doctor_on_gpus_and_a_hold(gpus):
    """Cards and holders counted; missing tools named and no failure; a hold and a release in their lines."""
    found = checks(gpus.ask("doctor"))
    assert (True, "1 device, 1 card, 0 holders") == (found["gpus"]["ok"], found["gpus"]["detail"])
    gpus.ask("lock", action="acquire", message="measuring")
    gpus.without("nvidia-smi", "fuser")
    found = checks(gpus.ask("doctor"))
    assert found["gpus"]["ok"] is None
    assert "fuser is not installed: only /proc was read" in found["gpus"]["detail"]
    assert "nvidia-smi is not installed" in found["gpus"]["detail"]
    assert (None, "held by ann: measuring") == (found["lock"]["ok"], found["lock"]["detail"])


def test_doctor_on_a_pushed_package(box):
    """Free lock, the release, an installed package with what is odd about it."""
    perform(box, "status")
    box.push("a/v1", threshold(5))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = checks(perform(box, "doctor", ports=[{"port": port, "argv": [], "engine": "sglang", "profile": "p"}]))
    assert (True, "free") == (found["lock"]["ok"], found["lock"]["detail"])
    assert (True, "release 1") == (found["journal"]["ok"], found["journal"]["detail"])
    assert (True, "free (p)") == (found[f"port {port}"]["ok"], found[f"port {port}"]["detail"])
    assert "fakesgl 1.2.3 (wheel)" in found["package"]["detail"]
    os.rename(box.package, box.root / "elsewhere")
    box.package.symlink_to(box.root / "elsewhere")
    assert found["package"]["detail"] != checks(perform(box, "doctor"))["package"]["detail"]
