"""Patches that do what no patch should, and what a push says then: nothing is lost, and no word of it is wrong."""

import subprocess
from pathlib import Path

import pytest
from rig import Rig

STAGED = '# /// deployctl\n# targets = ["version.py"]\n{more}# ///\nimport os, pathlib, shutil, subprocess, sys, time\n'
LIVE = "import os, pathlib, shutil, subprocess, sys, time\n"


@pytest.fixture
def rig(tmp_path):
    with Rig(tmp_path) as rig:
        yield rig


def write(rig: Rig, name: str, body: str, *, live: bool = False, more: str = "") -> str:
    """Write a patch of the series `odd`; returns its reference."""
    path = rig.work / "patches" / "odd" / f"{name}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        (LIVE if live else STAGED.format(more=more)) + f"live = pathlib.Path({str(rig.package)!r})\n" + body
    )
    return f"odd/{name}"


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("removal", ["shutil.rmtree(live)\n", "live.rename(live.parent / 'sglang.bak')\n"])
def test_a_script_that_takes_the_whole_package_away_is_undone(rig, live, removal):
    """The package's own folder comes back too, with its mode."""
    rig.package.chmod(0o750)
    before = rig.tree()
    result = rig.host("push", "--patch", write(rig, "gone", removal, live=live))
    assert (1, "restored") == (result["exit_code"], result["status"]), result
    assert before == rig.tree()
    assert 0o750 == rig.package.stat().st_mode & 0o777


def test_a_killed_script_that_took_the_whole_package_away_is_undone(rig):
    """The agent is killed with it: the next command brings the package back."""
    before = rig.tree()
    body = "shutil.rmtree(live)\nos.kill(os.getppid(), 9)\ntime.sleep(60)\n"
    result = rig.host("push", "--patch", write(rig, "gone", body, live=True))
    assert (1, "restored") == (result["exit_code"], result["status"]), result
    assert before == rig.tree()


def test_a_staged_script_that_fails_after_touching_the_live_tree_is_undone(rig):
    """Its targets promise a staged copy; what it did elsewhere in the package is put back although it failed by itself."""
    before = rig.tree()
    body = "(live / 'version.py').write_text('X = 1\\n')\nsys.exit('no anchor')\n"
    result = rig.host("push", "--patch", write(rig, "reaching", body))
    assert (1, "restored") == (result["exit_code"], result["status"]), result
    assert before == rig.tree()


def test_what_a_script_left_running_in_another_session_is_ended(rig):
    """A helper that has left the script's process group would write on into the tree that was put back."""
    pid = rig.root / "pid"
    body = (
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(child.pid))\ntime.sleep(60)\n"
    )
    result = rig.host("push", "--patch", write(rig, "hanging", body, more='# timeout = "1s"\n'))
    assert (1, "failed", "timeout") == (result["exit_code"], result["status"], result["error"]["kind"])
    state = subprocess.run(["ps", "-o", "stat=", "-p", pid.read_text()], capture_output=True, text=True).stdout
    assert state.strip() in ("", "Z", "Zs"), state


def test_a_module_that_is_taken_away_must_not_be_missed(rig):
    """There is nothing of it to import: the package itself is, and the push fails where it needs what has gone."""
    before = rig.tree()
    result = rig.host("push", "--patch", write(rig, "less", "(pathlib.Path(sys.argv[1]) / 'version.py').unlink()\n"))
    assert (1, "restored", "import") == (result["exit_code"], result["status"], result["error"]["kind"]), result
    assert before == rig.tree()


def test_a_patch_that_changes_nothing_says_so(rig):
    """A replacement whose anchor has gone ends well and does nothing: the worst way to test a patch."""
    body = (
        "path = pathlib.Path(sys.argv[1]) / 'version.py'\npath.write_text(path.read_text().replace('nowhere', 'x'))\n"
    )
    reference = write(rig, "idle", body)
    done = rig.run("push", "--patch", reference)
    assert 0 == done.returncode, done.stderr
    assert "warning: odd/idle changes no file" in done.stdout
    assert "warning: odd/idle changes no file" in rig.run("push", "--patch", write(rig, "idle2", body)).stdout.replace(
        "idle2", "idle"
    )


def test_the_hint_after_a_check_for_drift_shows_the_edits(rig):
    """The command that it offers is one that can be typed, and prints the difference."""
    rig.host("push", "--patch", "v3")
    path = Path(rig.package / "version.py")
    path.write_text(path.read_text() + "# by hand\n")
    result = rig.host("status", "--check")
    assert 9 == result["exit_code"]
    assert result["error"]["hint"].startswith("deployctl rollback --to 1 --dry-run ")
    shown = rig.run("rollback", "--to", "1", "--dry-run")
    assert 9 == shown.returncode
    assert "+# by hand" in shown.stdout


SECOND = "  other: {{address: 127.0.0.1, port: {port}, state_dir: /nowhere/of/ours}}\n"


def test_the_commands_that_are_offered_mean_the_host_they_stand_under(tmp_path):
    """Without --host they would go to the default hosts: a rollback or a release of a lock on another machine."""
    second = SECOND.replace("/nowhere/of/ours", str(tmp_path / "second-state"))
    with Rig(tmp_path, more_hosts=second) as rig:
        other = ("--host", "other")
        pushed = rig.run("push", "--patch", "v3", *other)
        assert "back with: deployctl rollback --host other\n" in pushed.stdout
        rig.run("lock", "acquire", "-m", "mine", *other)
        rig.environment["DEPLOYCTL_OPERATOR"] = "bob@example.org"
        locked = rig.json("push", "--patch", "v2", *other)["hosts"]["other"]
        assert "locked" == locked["status"]
        assert locked["error"]["hint"].endswith("deployctl lock release --host other --force")
        assert "deployctl launch --log-tag TAG" == rig.host("logs")["error"]["hint"]


def test_a_dry_run_does_not_call_the_plan_a_release(rig):
    """The stack that would be stands beside the release that stays."""
    planned = rig.run("push", "--patch", "v3", "--dry-run")
    assert planned.stdout.splitlines()[0] == "planned  dynamic_spec/v3; the host stays at release 0"


def test_a_mistyped_command_is_told_its_own_help(rig):
    """The one JSON object of a usage error points at that command's help."""
    told = rig.json("push")
    assert (2, "deployctl push --help") == (told["exit_code"], told["error"]["hint"])
    told = rig.json("lock", "acquire")
    assert (2, "deployctl lock acquire --help") == (told["exit_code"], told["error"]["hint"])
