"""One mutating command at a time: the kernel's lock, the manual hold, and what those who wait are told."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from sshd_rig import until
from support import Box, edit, everything, make_context, perform, perform_push, threshold

from deployctl.agent import lock
from deployctl.agent.failure import Failure

SLOW = edit(
    ["srt/args.py"],
    "import time\nprint('began', flush=True)\np = root / 'srt/args.py'\n"
    "while not os.path.exists({go!r}):\n    time.sleep(0.01)\np.write_text(p.read_text().replace('= 0', '= 5'))\n",
)


class Background:
    """A push by a real agent in another process that waits in its script until `go` exists."""

    def __init__(self, box: Box, **args) -> None:
        self.box, self.go = box, box.root / "go"
        self.result: dict = {}
        self.began = threading.Event()
        self._args = {"transaction": "slow", **args}
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        from deployctl.remote.client import Exchange
        from deployctl.transport.local import LocalTransport

        patch, blobs = self.box.patch("slow/v1", SLOW.replace("{go!r}", repr(str(self.go))))
        request = self.box.request("push", {"patch": patch, **self._args}, blobs)
        with LocalTransport(self.box.env) as transport, Exchange(transport, request) as exchange:
            for event in exchange.events():
                if event["event"] == "hello":
                    self.pid = event["pid"]
                if event["event"] == "output":
                    self.began.set()
        self.result = exchange.result

    def __enter__(self):
        self._thread.start()
        assert self.began.wait(20)
        return self

    def __exit__(self, *_):
        self.go.write_text("")
        self._thread.join(20)
        assert not self._thread.is_alive()


def test_a_second_push_is_told_who_is_at_work(near):
    """Exit 4 at once, with who, what and since when; reading commands read on and say the same; then it is free."""
    with Background(near) as background:
        other = make_context(near, "push")
        assert lock.current_holder(other.state)["pid"] == background.pid
        near.run_id, near.operator = "run-2", "ben@example.org"
        result = perform_push(near, "b/v1", threshold(6))
        assert (4, "locked", "locked") == (result["exit"], result["error"]["kind"], result["status"])
        for word in ("ann@example.org", "push", f"pid {background.pid}"):
            assert word in result["error"]["message"]
        history = perform(near, "history")
        assert "ann@example.org" == history["push_in_progress"]["operator"]
        shown = perform(near, "lock", action="show")
        assert ("ann@example.org", None) == (shown["holder"]["operator"], shown["hold"])
        assert "in-progress" == perform(near, "outcome", transaction="slow", timeout_s=0)["outcome"]
        assert "not-committed" == perform(near, "outcome", transaction="other", timeout_s=0)["outcome"]
    assert "pushed" == background.result["status"]
    assert None is perform(near, "lock", action="show")["holder"]
    assert (
        "pushed" == perform_push(near, "b/v1", edit(["version.py"], "(root / 'version.py').write_text('')\n"))["status"]
    )


def test_removing_the_lock_file_opens_nothing(near):
    """Somebody removes STATE/lock while a push is at work: others are still told who it is, a recovery does not touch
    its tree, and the push ends as if nothing had been."""
    with Background(near) as background:
        before = everything(near.package)
        (near.root / "state dir/lock").unlink()
        near.run_id, near.operator = "run-2", "ben@example.org"
        for _ in range(2):  # the lock file is missing at first, then there and free
            result = perform_push(near, "b/v1", threshold(6))
            assert (4, "locked") == (result["exit"], result["error"]["kind"]), result
            assert f"locked by ann@example.org (push, pid {background.pid})" in result["error"]["message"]
            assert "ann@example.org" == perform(near, "history")["push_in_progress"]["operator"]
            assert "in-progress" == perform(near, "outcome", transaction="slow", timeout_s=0)["outcome"]
            (near.root / "state dir/lock").unlink(missing_ok=True)
            assert background.pid == lock.current_holder(make_context(near, "status").state)["pid"]
        assert before == everything(near.package)
    assert ("pushed", 1) == (background.result["status"], background.result["release"])
    edited = edit(["version.py"], "(root / 'version.py').write_text('')\n")
    assert ("pushed", 2) == tuple(perform_push(near, "b/v1", edited)[key] for key in ("status", "release"))
    assert [] == perform(near, "status")["drift"]


def test_a_lock_that_was_lost_before_anything_changed(near):
    """Removed before the transaction opens: others may be at work by now, so this one changes nothing."""
    before = everything(near.package)

    def remove(_, event):
        if event["event"] == "step" and event["name"] == "stage" and event["state"] == "done":
            (near.root / "state dir/lock").unlink()

    near.on_event = remove
    result = perform_push(near, "a/v1", threshold(5))
    near.on_event = None
    assert (1, "failed", "lock-lost") == (result["exit"], result["status"], result["error"]["kind"]), result
    assert before == everything(near.package)
    assert not (near.root / "state dir/journal.json").exists()
    assert "pushed" == perform_push(near, "a/v1", threshold(5))["status"]


@pytest.mark.parametrize("step", ["swap", "import"])
@pytest.mark.parametrize("ended", [False, True])
def test_a_push_that_was_taken_over_leaves_the_tree_to_the_other(near, step, ended):
    """The journal is another command's by now, or that has committed and closed it: exit 8 that says so, and neither
    a swap, nor a commit, nor an undo from what this one remembers."""
    journal, current = near.root / "state dir/journal.json", near.root / "state dir/current.json"
    seen = {}

    def take_over(_, event):
        if event["event"] == "step" and (event["name"], event["state"]) == (step, "start"):
            if ended:
                journal.unlink()
                now = json.loads(current.read_text())
                current.write_text(json.dumps({**now, "move": now["move"] + 1}))
            else:
                journal.write_text(json.dumps({**json.loads(journal.read_text()), "transaction": "theirs"}))
            seen["tree"] = everything(near.package)
            seen["files"] = [path.read_text() if path.exists() else None for path in (journal, current)]

    near.on_event = take_over
    result = perform_push(near, "a/v1", threshold(5))
    assert (8, "taken-over") == (result["exit"], result["error"]["kind"]), result
    assert seen["tree"] == everything(near.package)
    assert seen["files"] == [path.read_text() if path.exists() else None for path in (journal, current)]


def test_a_journal_that_was_removed(near):
    """By hand, in the middle: nobody else was at work, so the tree is put back, and that is said."""
    before = everything(near.package)

    def remove(_, event):
        if event["event"] == "step" and (event["name"], event["state"]) == ("import", "done"):
            (near.root / "state dir/journal.json").unlink()

    near.on_event = remove
    result = perform_push(near, "a/v1", threshold(5))
    near.on_event = None
    assert (1, "restored", "journal-lost") == (result["exit"], result["status"], result["error"]["kind"]), result
    assert before == everything(near.package)
    assert "pushed" == perform_push(near, "a/v1", threshold(5))["status"]


def test_outcome_waits_for_a_transaction_that_still_runs(near):
    """Asked while the agent is at work without its client: the answer is the end, not a guess."""
    with Background(near) as background:
        answers = []
        asking = threading.Thread(target=lambda: answers.append(perform(near, "outcome", transaction="slow")))
        asking.start()
        background.go.write_text("")
        asking.join(20)
    assert [("committed", 1)] == [(answer["outcome"], answer["release"]) for answer in answers]


def test_doctor_tells_a_push_at_work_from_an_interrupted_one(near):
    """The same open transaction: in progress while its holder lives, interrupted when it was killed."""

    def journal() -> tuple:
        checks = {check["name"]: check for check in perform(near, "doctor")["checks"]}
        return checks["journal"]["detail"], checks["journal"]["hint"]

    background = Background(near)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda *_: None)
        with background:
            assert ("a push of ann@example.org is in progress", "wait for its end: deployctl status") == journal()
            os.kill(background.pid, signal.SIGKILL)
            until(lambda: lock.current_holder(make_context(near, "doctor").state) is None, what="the end of the holder")
            assert ("an interrupted push is open", "deployctl status recovers it") == journal()


def test_another_name_of_the_same_machine(near):
    """The same command under two inventory names: the second is told of which host it is an alias."""
    with Background(near):
        near.host["name"] = "box-by-address"
        result = perform_push(near, "a/v1", threshold(5))
        near.host["name"] = "box"
    assert ("alias", "box") == (result["error"]["kind"], result["alias_of"])


def test_the_lock_dies_with_its_holder(near):
    """SIGKILL to the holder: the next command takes over, says whose push it was, and goes on."""
    before = everything(near.package)
    background = Background(near)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda *_: None)
        with background:
            os.kill(background.pid, signal.SIGKILL)
            near.run_id, near.operator = "run-2", "ben@example.org"
            result = perform_push(near, "a/v1", threshold(6), dry_run=True)
    assert "planned" == result["status"]
    recovered = [event for event in near.events if event["event"] == "recovered"]
    assert [("ann@example.org", "push", "before")] == [(e["operator"], e["command"], e["to"]) for e in recovered]
    assert before == everything(near.package)
    entries = perform(near, "audit")["entries"]
    assert [("ben@example.org", "recovered")] == [(entry["operator"], entry["status"]) for entry in entries]


def test_two_pushes_at_once(box):
    """Started in the same moment, twenty rounds: one does it, the other is locked out or finds it done; never a mix."""
    results = []

    def push(number: int) -> None:
        mine = Box.__new__(Box)
        mine.__dict__.update(box.__dict__, run_id=f"run-{number}")
        results.append(mine.push("a/v1", threshold(number), transaction=f"t{number}"))

    for number in range(10):
        threads = [threading.Thread(target=push, args=(100 + 2 * number + which,)) for which in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    statuses = [result["status"] for result in results]
    assert set(statuses) <= {"pushed", "locked"}, results
    pushed = [result for result in results if result["status"] == "pushed"]
    assert len(pushed) >= 10
    assert list(range(1, len(pushed) + 1)) == sorted(result["release"] for result in pushed)
    last = max(pushed, key=lambda result: result["release"])
    history = box.ask("history")
    assert history["release"] == last["release"]
    assert [] == box.ask("status")["drift"]


def test_a_reading_command_with_the_lock_is_waited_for(near):
    """A reader holds it for a moment, to recover: a push waits instead of failing with a stale name."""
    perform_push(near, "a/v1", threshold(5))
    path = near.root / "state dir/lock"
    stale = {"operator": "gone", "command": "push", "pid": 2**22 - 3, "mutating": True, "since": 0}
    code = (
        "import fcntl, sys, time\nf = open(sys.argv[1], 'r+')\nfcntl.flock(f, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\ntime.sleep(0.3)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        path.write_text(json.dumps(stale))
        assert "pushed" == perform_push(near, "a/v2", threshold(6))["status"]


def test_waiting_for_the_lock_ends(near, monkeypatch):
    """A lock that nobody signed is not waited for without end; Ctrl-C ends the waiting, too."""
    perform_push(near, "a/v1", threshold(5))
    monkeypatch.setattr(lock, "_PATIENCE_S", 0.05)
    path = near.root / "state dir/lock"
    code = "import fcntl, sys\nf = open(sys.argv[1], 'r+')\nfcntl.flock(f, fcntl.LOCK_EX)\nprint('x', flush=True)\nsys.stdin.read()\n"
    argv = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        path.write_text("[]")
        result = perform_push(near, "a/v2", threshold(6))
        assert (4, "unknown") == (result["exit"], result["holder"]["operator"])
        (near.root / "state dir/staging").mkdir()
        assert "unknown" == perform(near, "history")["push_in_progress"]["operator"]
        monkeypatch.setattr(lock, "_PATIENCE_S", 60)
        context = make_context(near, "push")
        context.wire.cancelled.set()
        with pytest.raises(Failure) as caught, lock.exclusive(context):
            pass
        assert 130 == caught.value.exit_code
        holder.stdin.close()
    assert None is perform(near, "history")["push_in_progress"]
    assert not (near.root / "state dir/staging").exists()


@pytest.mark.parametrize(
    ("found", "lives"),
    [({"pid": os.getpid()}, True), ({"pid": 2**22 - 3}, False), ({}, True), ({"pid": "x"}, True), ({"pid": 1}, True)],
)
def test_whether_a_holder_lives(found, lives):
    """Only a process that is certainly gone counts as gone."""
    assert lives == lock._lives(found)


def test_a_manual_hold(near):
    """It survives its command, stops everybody but its holder, who is told; others release it only with force."""
    assert "held" == perform(near, "lock", action="acquire", message="benchmark running")["status"]
    result = perform_push(near, "a/v1", threshold(5))
    assert "pushed" == result["status"]
    assert any("benchmark running" in event.get("text", "") for event in near.events if event["event"] == "warning")
    near.operator = "ben@example.org"
    for refused in (
        perform_push(near, "a/v2", threshold(6)),
        perform(near, "rollback", transaction="x"),
        perform(near, "lock", action="acquire"),
        perform(near, "lock", action="release"),
    ):
        assert (4, "held", "locked") == (refused["exit"], refused["error"]["kind"], refused["status"])
        assert "held by ann@example.org" in refused["error"]["message"]
        assert "benchmark running" in refused["error"]["message"]
        assert "deployctl lock release" in refused["error"]["hint"]
    assert "released" == perform(near, "lock", action="release", force=True)["status"]
    assert "unchanged" == perform(near, "lock", action="release")["status"]
    assert "pushed" == perform_push(near, "a/v2", threshold(6))["status"]
    statuses = [entry["status"] for entry in perform(near, "audit")["entries"]]
    assert ["held", "pushed", "released", "unchanged", "pushed"] == statuses
    assert (2, "usage") == (
        perform(near, "lock", action="x")["exit"],
        perform(near, "lock", action="x")["error"]["kind"],
    )


def test_names_and_messages_are_one_line(near):
    """A line break in an operator, a command or a message would look like another entry of the audit log."""
    near.operator = "ann\nben@example.org  pushed\r\n"
    shown = perform(near, "lock", action="acquire", message="mine\nroot  released\tnow ")["hold"]
    assert ("ann ben@example.org pushed", "mine root released now") == (shown["operator"], shown["message"])
    assert "pushed" == perform_push(near, "a/v1", threshold(5))["status"]  # they are still the holder
    assert {"ann ben@example.org pushed"} == {entry["operator"] for entry in perform(near, "audit")["entries"]}


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7300, "2 h"), (200_000, "2 d")]
)
def test_ages_read_as_people_say_them(seconds, words):
    """Seconds, minutes, hours, days."""
    assert words == lock._age(time.time() - seconds - 0.01)


def test_the_machine_has_one_identity(near):
    """Made once, kept."""
    context = make_context(near, "status")
    context.state.create()
    assert lock.machine_identity(context.state) == lock.machine_identity(context.state)


def test_a_full_disk_does_not_stop_the_lock(near):
    """The kernel's lock is the truth; that its file does not name the holder is said and no more."""
    perform_push(near, "a/v1", threshold(5))
    context = make_context(near, "push")
    with open("/dev/full", "wb") as full:
        lock._sign(full.fileno(), context, mutating=True)
        lock._release(os.dup(full.fileno()))
    assert ["warning"] == [event["event"] for event in context.wire.events]


def test_a_file_system_without_locks_is_named(near, monkeypatch):
    """Network file systems may be mounted without them: the setting that helps is in the hint."""

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    result = perform_push(near, "a/v1", threshold(5))
    assert ("no-locks", "No locks available") == (result["error"]["kind"], result["error"]["message"][-18:])
    assert "state_dir" in result["error"]["hint"]


def test_the_holder_of_a_host_that_was_never_used(near):
    """No lock file, or one that says nothing."""
    context = make_context(near, "status")
    assert None is lock.current_holder(context.state)
    assert None is lock.holder(context.state)
    context.state.create()
    (near.root / "state dir/lock").write_text("torn {")
    assert None is lock.holder(context.state)
