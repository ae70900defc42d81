"""What the next command does with a tree that an interrupted one left, and what it does when it cannot."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest
from sshd_rig import until
from support import edit, everything, make_context, perform, perform_push, threshold

from deployctl.agent import journal, processes, recover
from deployctl.agent.failure import Failure
from deployctl.agent.state import State
from deployctl.errors import LinkLost

BOTH = edit(
    ["srt/args.py", "srt/worker.py"],
    "for n in ('args', 'worker'):\n    p = root / f'srt/{n}.py'\n    p.write_text(p.read_text() + 'X = 1\\n')\n",
)


def kill_half_way(near) -> dict:
    """A push of two files killed with one of them swapped; returns the tree before."""
    before = everything(near.package)
    for at in range(1, 60):
        with pytest.raises(LinkLost):
            near.push("half/v1", BOTH, transaction=f"half-{at}", crash_at=at)
        if before["srt/args.py"] != everything(near.package)["srt/args.py"]:
            return before
        near.ask("history")
    raise AssertionError("nothing was ever swapped")


def test_an_edit_after_the_crash_is_kept_and_reported(near):
    """Somebody looks into the half-made tree and saves a file before the next command: it is copied away first."""
    perform_push(near, "a/v1", threshold(5))
    before = kill_half_way(near)
    (near.package / "srt/worker.py").write_text("SAVED = 1\n")
    (near.package / "srt/notes.txt").write_text("it crashed here\n")
    assert 1 == perform(near, "status")["release"]
    [event] = [event for event in near.events if event["event"] == "recovered"]
    assert ("before", 1, "ann@example.org") == (event["to"], event["release"], event["operator"])
    kept = Path(event["displaced"])
    assert ["SAVED = 1\n", "it crashed here\n"] == [(kept / "srt" / n).read_text() for n in ("worker.py", "notes.txt")]
    assert before == everything(near.package)
    assert [] == perform(near, "status")["drift"]


@pytest.mark.parametrize("command", ["push", "rollback", "status", "history", "outcome", "logs", "lock"])
def test_whatever_command_comes_next_recovers(near, command):
    """Reading and mutating commands alike; a push then goes on from the release before."""
    perform_push(near, "a/v1", threshold(5))
    before = kill_half_way(near)
    args: dict = {"lock": {"action": "show"}, "outcome": {"transaction": "half-1"}}.get(command, {})
    if command == "push":
        assert "unchanged" == perform_push(near, "a/v1", threshold(5))["status"]
    else:
        perform(near, command, **args)
    if command == "rollback":
        assert 0 == perform(near, "history")["release"]
    elif command == "lock":
        assert (near.root / "state dir/journal.json").exists(), "showing the lock touches nothing"
    else:
        assert before == everything(near.package)


def test_leftovers_of_killed_agents_go(near):
    """Temporary state files, staged copies without a journal, a release that was never committed."""
    perform_push(near, "a/v1", threshold(5))
    kill_half_way(near)
    state = near.root / "state dir"
    for path in (state / ".deployctl-x", state / "releases/.deployctl-y"):
        path.write_text("")
    perform(near, "history")
    assert not list(state.rglob(".deployctl-*"))
    (state / "staging/left").mkdir(parents=True)
    perform(near, "history")
    assert not (state / "staging").exists()
    assert [1] == [entry["release"] for entry in perform(near, "history")["releases"]][1:]


class _Bound:
    """A file that cannot be renamed over: a mount point."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self):
        subprocess.run(["mount", "--bind", str(self.path), str(self.path)], check=True)

    def __exit__(self, *_):
        subprocess.run(["umount", "-l", str(self.path)], check=True)


def test_a_file_that_cannot_be_put_back(near):
    """Exit 8 naming it, the journal kept, no other command goes on; mended, the next one recovers."""
    perform_push(near, "a/v1", threshold(5))
    before = kill_half_way(near)
    half = near.package / "srt/args.py"
    with _Bound(half):
        for result in (perform(near, "history"), perform_push(near, "b/v1", threshold(6))):
            assert (8, "needs-recovery") == (result["exit"], result["error"]["kind"])
            assert str(half) in result["error"]["message"]
            assert "any deployctl command" in result["error"]["hint"]
        assert (near.root / "state dir/journal.json").exists()
    assert 1 == perform(near, "history")["release"]
    assert before == everything(near.package)


def test_a_push_that_cannot_undo_itself(near):
    """Both reasons are told, exit 8; the next command finishes the undoing."""
    before = everything(near.package)
    target = near.package / "srt/args.py"
    script = (
        f"import subprocess, sys\np = {str(target)!r}\nopen(p, 'a').write('X = 1\\n')\n"
        "subprocess.run(['mount', '--bind', p, p], check=True)\nsys.exit(3)\n"
    )
    try:
        result = perform_push(near, "a/v1", script)
    finally:
        subprocess.run(["umount", "-l", str(target)], check=True)
    assert (8, "needs-recovery") == (result["exit"], result["error"]["kind"]), result
    assert str(target) in result["error"]["message"]
    assert "begun because: a/v1 failed: exit status 3" in result["error"]["message"]
    assert 0 == perform(near, "history")["release"]
    assert before == everything(near.package)


def test_another_writer_during_the_recovery(near, monkeypatch):
    """A file that is changed again as soon as it is put back: said, not overlooked."""
    perform_push(near, "a/v1", threshold(5))
    kill_half_way(near)
    real = recover.writer.sweep

    def sweep(directory, folders, mark):
        real(directory, folders, mark)
        (near.package / "version.py").write_text("AGAIN = 1\n")

    monkeypatch.setattr(recover.writer, "sweep", sweep)
    result = perform(near, "history")
    assert (8, "needs-recovery") == (result["exit"], result["error"]["kind"])
    assert "another process writes to it: version.py" in result["error"]["message"]


def test_a_script_that_cannot_be_ended(near, monkeypatch):
    """Then the tree is not put back under its hands."""
    perform_push(near, "a/v1", threshold(5))
    kill_half_way(near)
    with subprocess.Popen(["sleep", "60"], env={**os.environ, journal.SCRIPT_MARKER: "x"}) as sleeper:
        monkeypatch.setattr(processes, "marked", lambda wanted, _: [(processes.snapshot()[sleeper.pid], wanted)])
        monkeypatch.setattr(processes, "end", lambda found, *_: found)
        result = perform(near, "history")
        sleeper.kill()
    assert (8, "needs-recovery") == (result["exit"], result["error"]["kind"])
    assert f"its patch script still runs (pid {sleeper.pid})" in result["error"]["message"]


def test_a_script_of_another_state_is_left_alone(near):
    """Ids are the clients' words: a recovery does not end the script of another package's transaction of that id."""
    kill_half_way(near)
    transaction = journal.read(make_context(near, "status").state)["transaction"]
    state = State(str(near.root / "another state"))
    marks = [journal.script_mark(owner, transaction) for owner in (state, make_context(near, "status").state)]
    with contextlib.ExitStack() as stack:
        other, ours = (
            stack.enter_context(subprocess.Popen(["sleep", "60"], env={**os.environ, journal.SCRIPT_MARKER: mark}))
            for mark in marks
        )
        stack.callback(other.kill)
        stack.callback(ours.kill)
        # Its environment is the new program's once /proc shows it.
        for process, mark in zip((other, ours), marks, strict=True):
            until(lambda p=process, m=mark: m.encode() in Path(f"/proc/{p.pid}/environ").read_bytes(), what="exec")
        perform(near, "history")
        assert -signal.SIGKILL == ours.wait(10)
        assert other.poll() is None


@pytest.mark.parametrize("step", ["preflight", "stage", "compile", "swap", "import", "commit"])
def test_a_fault_of_our_own_restores_too(near, step):
    """An error that nobody thought of, anywhere before the commit: the tree is as it was, the error is told."""
    perform_push(near, "a/v1", threshold(5))
    before = everything(near.package)

    def fault(_, event):
        if event["event"] == "step" and (event["name"], event["state"]) == (step, "start"):
            raise ZeroDivisionError("unthought of")

    near.on_event = fault
    result = perform_push(near, "b/v1", BOTH)
    near.on_event = None
    assert (1, "internal") == (result["exit"], result["error"]["kind"])
    assert "unthought of" in result["error"]["message"]
    assert before == everything(near.package)
    assert not (near.root / "state dir/journal.json").exists()
    assert "pushed" == perform_push(near, "b/v1", BOTH)["status"]


def test_an_error_of_the_disk_is_said_in_words(near):
    """An OSError from anywhere becomes the path and the reason."""

    def fault(_, event):
        if event["event"] == "step" and event["name"] == "import":
            raise OSError(28, "No space left on device", "/some/where")

    near.on_event = fault
    result = perform_push(near, "b/v1", BOTH)
    assert ("restored", "disk-full", "no space left on /some/where") == (
        result["status"],
        result["error"]["kind"],
        result["error"]["message"],
    )


def test_after_the_commit_there_is_no_way_back(near, monkeypatch):
    """Tidying that fails is a warning; a fault after it does not undo what is done."""
    monkeypatch.setattr(recover, "close", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    result = perform_push(near, "a/v1", threshold(5))
    monkeypatch.undo()
    assert "pushed" == result["status"]
    assert any("tidying after the commit failed" in text for text in result["warnings"])
    assert (near.root / "state dir/journal.json").exists()
    for name, value in near.env.items():
        os.environ[name] = value
    assert 1 == perform(near, "history")["release"]
    assert ["after"] == [event["to"] for event in near.events if event["event"] == "recovered"]

    def fault(_, event):
        if event["event"] == "step" and (event["name"], event["state"]) == ("commit", "done"):
            raise ZeroDivisionError

    near.on_event = fault
    assert "internal" == perform_push(near, "b/v1", BOTH)["error"]["kind"]
    near.on_event = None
    assert 2 == perform(near, "history")["release"]
    assert [] == perform(near, "status")["drift"]


def test_an_edit_between_the_commit_and_the_recovery_is_drift(near):
    """Committed and killed before the tidying: an edit since then is somebody's work and stays where it is."""
    for at in range(1, 60):
        with pytest.raises(LinkLost):
            near.push("a/v1", threshold(5), transaction=f"c-{at}", crash_at=at)
        state = make_context(near, "status").state
        entry = journal.read(state)
        if entry is not None and journal.is_committed(state, entry):
            break
        near.ask("history")
    (near.package / "srt/worker.py").write_text("SAVED = 1\n")
    status = perform(near, "status")
    assert (1, ["srt/worker.py"]) == (status["release"], [entry["path"] for entry in status["drift"]])
    assert "SAVED = 1\n" == (near.package / "srt/worker.py").read_text()


def test_cancelled_in_the_last_moment_before_the_commit(near):
    """The imports are done, the word to commit is not given yet."""
    before = everything(near.package)

    def cancel(wire, event):
        if event["event"] == "step" and (event["name"], event["state"]) == ("import", "done"):
            wire.cancelled.set()

    near.on_event = cancel
    result = perform_push(near, "a/v1", threshold(5))
    assert ("restored", 130) == (result["status"], result["exit"])
    assert before == everything(near.package)


def test_modules_that_a_rollback_leaves_behind(near):
    """A patch's verify list names a module that the older release does not have, and one of another package."""
    script = edit(["srt/new.py"], "(root / 'srt/new.py').write_text('N = 1\\n')\n").replace(
        "# ///\nimport", '# verify = ["fakesgl.srt.new", "fakesgl", "json"]\n# ///\nimport'
    )
    assert ["fakesgl.srt.new", "fakesgl", "json"] == perform_push(near, "a/v1", script)["verified"]
    assert ["fakesgl", "json"] == perform(near, "rollback", transaction="x")["verified"]


def test_a_failure_keeps_its_own_words(near):
    """An undo without a journal has nothing to do; a Failure that carries fields keeps them."""
    result = perform_push(near, "a/v1", edit(["srt/args.py"], "print('last words')\nsys.exit(1)\n"))
    assert "last words" in result["output"]
    assert {"transaction", "release", "patches", "steps", "displaced", "warnings", "output"} <= set(result)
    diff = "--- a/srt/args.py\n+++ b/srt/args.py\n@@ -1 +1 @@\n-NOT THERE\n+X\n"
    result = perform_push(near, "a/v1", diff)
    assert ("failed", 1) == (result["status"], result["exit"])
    assert Failure("x").as_result()["status"] == "failed"


def test_the_package_owner_is_told_who_they_are(near, monkeypatch):
    """A user id without a name is a number."""
    from deployctl.agent import push

    monkeypatch.setattr("getpass.getuser", lambda: (_ for _ in ()).throw(KeyError("uid")))
    assert f"uid {os.geteuid()}" == push._user()
