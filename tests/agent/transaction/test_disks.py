"""Full, read-only and noexec disks, and files that may not be written: real mounts, clear errors, the tree untouched."""

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from support import Box, edit, everything, perform, perform_push, threshold

from deployctl.transport.local import LocalTransport


@contextlib.contextmanager
def mounted(folder: Path, options: str):
    """A tmpfs over `folder` that begins with its content."""
    folder.mkdir(exist_ok=True)
    kept = folder.parent / (folder.name + ".content")
    folder.rename(kept)
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        subprocess.run(["cp", "-a", f"{kept}/.", str(folder)], check=True)
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()
        kept.rename(folder)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def fill(path: Path, leave: int = 0) -> None:
    """Use the file system of `path` up, but for `leave` bytes."""
    usage = os.statvfs(path.parent)
    path.write_bytes(b"x" * (usage.f_bavail * usage.f_frsize - leave))


GROW = edit(["srt/args.py"], "(root / 'srt/args.py').write_text('BIG = \"' + 'x' * 100_000 + '\"\\n')\n")


def live(near, body: str) -> str:
    return f"import os, pathlib\nroot = pathlib.Path({str(near.package)!r})\n" + body


def test_a_package_on_a_full_disk(near):
    """A staged change that does not fit is refused before the swap, by name and figures; the tree is as it was."""
    with mounted(near.package, "size=128k"):
        before = everything(near.package)
        fill(near.package / "big.bin", leave=60 * 1024)
        edited = everything(near.package)
        result = perform_push(near, "a/v1", GROW, adopt=True)
        assert (1, "disk-full", "failed") == (result["exit"], result["error"]["kind"], result["status"])
        assert f"no space left on {near.package}" in result["error"]["message"]
        assert edited == everything(near.package)
        assert not list(near.package.rglob(".deployctl-*"))
        (near.package / "big.bin").unlink()
        assert before == everything(near.package)


@pytest.mark.parametrize("spare", [0, 4096])
def test_a_live_script_fills_the_disk(near, spare):
    """It has cut a file and used the disk up: the file comes back all the same."""
    with mounted(near.package, "size=256k"):
        before = everything(near.package)
        body = (
            "(root / 'srt/worker.py').write_text('')\n"
            "with open(root / 'srt/args.py', 'wb', buffering=0) as out:\n"
            f"    usage = os.statvfs(root)\n    out.write(b'y' * (usage.f_bavail * usage.f_frsize - {spare}))\n"
            "    out.write(b'z' * 100_000)\n    raise SystemExit(1)\n"
        )
        result = perform_push(near, "a/v1", live(near, body))
        assert (1, "restored", "script-failed") == (result["exit"], result["status"], result["error"]["kind"]), result
        assert before == everything(near.package)


def test_a_state_on_a_full_disk(near):
    """No room for the snapshot: said with figures before anything is stored; room again, and the push works."""
    state = near.root / "state dir"
    before = everything(near.package)
    with mounted(state, "size=16k"):
        result = perform_push(near, "a/v1", threshold(5))
        assert (1, "disk-full", "failed") == (result["exit"], result["error"]["kind"], result["status"]), result
        assert str(state) in result["error"]["message"]
        assert not (state / "objects").exists()
        assert before == everything(near.package)
        remount(state, "size=1m")
        assert "pushed" == perform_push(near, "a/v1", threshold(5))["status"]


@pytest.mark.parametrize("kilobytes", range(36, 100, 4))
def test_a_state_disk_that_fills_up_at_any_moment(near, kilobytes):
    """Wherever the state runs out of space, the push fails or is done; the tree is old or new, and the next push with
    room again works."""
    state = near.root / "state dir"
    before = everything(near.package)
    with mounted(state, f"size={kilobytes}k"):
        result = perform_push(near, "a/v1", threshold(5))
        if result["exit"]:
            assert "disk-full" == result["error"]["kind"], result
            assert "no space left on" in result["error"]["message"]
            assert before == everything(near.package)
        remount(state, "size=4m")
        assert 0 == perform(near, "status")["exit"]
        result = perform_push(near, "a/v1", threshold(6))
        assert "pushed" == result["status"], result
        assert not (state / "journal.json").exists()


def test_a_read_only_package(near):
    """Refused in the preflight, by name."""
    with mounted(near.package, "size=1m"):
        remount(near.package, "ro")
        before = everything(near.package)
        result = perform_push(near, "a/v1", threshold(5))
        assert ("failed", "read-only") == (result["status"], result["error"]["kind"])
        assert f"read-only file system: {near.package}" == result["error"]["message"]
        assert before == everything(near.package)


def test_a_read_only_state(near):
    """Refused by name before anything begins."""
    state = near.root / "state dir"
    perform_push(near, "a/v1", threshold(5))
    with mounted(state, "size=4m"):
        remount(state, "ro")
        for result in (perform_push(near, "a/v2", threshold(6)), perform(near, "rollback", transaction="x")):
            assert ("failed", "read-only") == (result["status"], result["error"]["kind"]), result
            assert str(state) in result["error"]["message"]
        assert 1 == perform(near, "history")["release"]


def test_noexec_disks_are_no_obstacle(near):
    """Patch scripts are read by the interpreter, not executed."""
    state = near.root / "state dir"
    with mounted(state, "size=4m,noexec"), mounted(near.package, "size=1m,noexec"):
        assert "pushed" == perform_push(near, "a/v1", threshold(5))["status"]


def test_an_immutable_target(near):
    """chattr +i on one of two targets: named, and the other is not changed either."""
    perform_push(near, "a/v0", threshold(4))
    before = everything(near.package)
    target = near.package / "srt/worker.py"
    done = subprocess.run(["chattr", "+i", str(target)], capture_output=True, text=True)
    if done.returncode != 0:
        # This file system has no such attribute: a mount over the file refuses the rename in the same way.
        subprocess.run(["mount", "--bind", str(target), str(target)], check=True)
    try:
        body = "for n in ('args', 'worker'):\n    p = root / f'srt/{n}.py'\n    p.write_text('X = 1\\n')\n"
        result = perform_push(near, "b/v1", edit(["srt/args.py", "srt/worker.py"], body))
        assert 1 == result["exit"], result
        assert str(target) in result["error"]["message"]
        assert before == everything(near.package)
    finally:
        if done.returncode == 0:
            subprocess.run(["chattr", "-i", str(target)], check=True)
        else:
            subprocess.run(["umount", str(target)], check=True)


class AsNobody(LocalTransport):
    """Runs the agent as a user without rights."""

    def open(self, argv):
        return super().open(["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *argv])


@pytest.fixture
def nobody():
    """A box whose interpreter everybody can run, and an `ask` that is somebody without rights; its folders are open."""
    with tempfile.TemporaryDirectory(prefix="deployctl-test-") as folder:
        Path(folder).chmod(0o755)
        box = Box(Path(folder), "/usr/bin/python3")
        box.transport = AsNobody
        box.operator = "nobody@example.org"
        yield box


def owned(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    os.chown(path, 65534, 65534)
    return path


def test_a_user_without_rights(nobody):
    """Not the owner of the package: named, with the setting that mends it; not the owner of the state: likewise."""
    nobody.host["state_dir"] = str(owned(nobody.root / "open") / "state")
    before = everything(nobody.package)
    result = nobody.push("a/v1", threshold(5))
    assert ("failed", "permission") == (result["status"], result["error"]["kind"]), result
    assert f"may not write to {nobody.package}" in result["error"]["message"]
    assert "`user:`" in result["error"]["hint"]
    assert before == everything(nobody.package)
    nobody.host["state_dir"] = str(nobody.root / "closed")
    (nobody.root / "closed").mkdir(mode=0o700)
    for result in (nobody.push("a/v1", threshold(5)), nobody.ask("history")):
        assert result["error"]["kind"] in ("permission", "state-unreadable"), result
        assert str(nobody.root / "closed") in result["error"]["message"]


def test_a_package_of_ones_own(nobody):
    """Without root: a push works, new files are the user's own, and what may not be read is named."""
    for path in [nobody.package, *nobody.package.rglob("*")]:
        os.chown(path, 65534, 65534)
    nobody.host["state_dir"] = str(owned(nobody.root / "mine"))
    os.chown(nobody.package / "srt/worker.py", 0, 65534)
    os.chmod(nobody.package / "srt/worker.py", 0o664)
    script = edit(
        ["srt/n/", "srt/worker.py"],
        "(root / 'srt/n').mkdir()\n(root / 'srt/n/n.py').write_text('')\n(root / 'srt/worker.py').write_text('W = 1')\n",
    )
    result = nobody.push("a/v1", script)
    assert "pushed" == result["status"], result
    assert [65534, 65534] == [(nobody.package / f"srt/{name}").stat().st_uid for name in ("n/n.py", "worker.py")]
    closed = nobody.package / "srt/secret"
    closed.mkdir(mode=0o700)
    result = nobody.push("b/v1", threshold(5), transaction="t2")
    assert ("permission", f"permission denied: {closed} cannot be read") == (
        result["error"]["kind"],
        result["error"]["message"],
    )
    closed.rmdir()
    (nobody.package / "srt/secret.py").write_text("")
    (nobody.package / "srt/secret.py").chmod(0)
    result = nobody.push("b/v1", threshold(5), transaction="t3")
    assert "srt/secret.py cannot be read" in result["error"]["message"]
