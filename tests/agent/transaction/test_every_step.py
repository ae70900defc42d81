"""Kill the agent at every boundary of every kind of transaction: the next command finds exactly old or new."""

import os
import signal
import subprocess
import time

import pytest
from support import Box, edit, everything, threshold

from deployctl.errors import LinkLost

ADD_AND_DELETE = edit(
    ["srt/args.py", "srt/new/module.py", "srt/data.json"],
    "(root / 'srt/args.py').write_text('THRESHOLD = 11\\n\\n\\ndef threshold():\\n    return THRESHOLD\\n')\n"
    "(root / 'srt/new').mkdir()\n(root / 'srt/new/module.py').write_text('NEW = 1\\n')\n"
    "(root / 'srt/data.json').unlink()\n",
)
DIFF = """\
--- a/srt/worker.py
+++ b/srt/worker.py
@@ -2,4 +2,4 @@


 def run(batch):
-    return batch + args.threshold()
+    return batch - args.threshold()
--- /dev/null
+++ b/srt/fresh/deep/added.py
@@ -0,0 +1 @@
+ADDED = 1
--- a/srt/data.json
+++ /dev/null
@@ -1 +0,0 @@
-{"a": 1}
""".replace("\n\n\n", "\n \n \n")


def live(box: Box, extra: str = "") -> str:
    """A script without metadata, with absolute paths, as people have them lying about: it replaces a link by a file,
    loses a mode, adds a file in a new folder and deletes another."""
    return (
        f"import os, pathlib\nroot = pathlib.Path({str(box.package)!r})\n"
        "p = root / 'srt/worker.py'\n"
        "t = root / 'srt/temporary'\nt.write_text(p.read_text() + 'LIVE = 1\\n')\nt.chmod(0o600)\nos.replace(t, p)\n"
        "l = root / 'srt/linked.py'\n"
        "t.write_text('LINKED = 2\\n')\nos.replace(t, l)\n"
        "(root / 'srt/more').mkdir()\n(root / 'srt/more/extra.py').write_text('EXTRA = 1\\n')\n"
        "(root / 'srt/data.json').unlink(missing_ok=True)\n" + extra
    )


def prepare(box: Box, kind: str):
    """Bring the box to the state before the transaction; returns (operation, reference, script, arguments)."""
    real = box.root / "elsewhere.py"
    real.write_text("LINKED = 1\n")
    (box.package / "srt/linked.py").symlink_to(real)
    (box.package / "srt/empty").mkdir()
    (box.package / "srt/worker.py").chmod(0o664)
    os.chown(box.package / "srt/worker.py", 1234, 1234)
    if kind == "first":
        return ("push", "a/v1", ADD_AND_DELETE, {"adopt": True})
    assert box.push("base/v1", threshold(3), transaction="p0", adopt=True)["status"] == "pushed"
    if kind == "staged":
        return ("push", "a/v1", ADD_AND_DELETE, {})
    if kind == "diff":
        return ("push", "a/v1", DIFF, {})
    if kind == "live":
        return ("push", "a/v1", live(box), {})
    assert box.push("a/v1", edit(["version.py"], "(root / 'version.py').write_text('V = 1\\n')\n"), transaction="p1")
    assert box.push("b/v1", live(box), transaction="p2")["status"] == "pushed"
    if kind == "stack":
        return ("push", "a/v2", ADD_AND_DELETE.replace("srt/args.py", "version.py"), {})
    if kind == "forced":
        (box.package / "srt/args.py").write_text("BY = 'hand'\n")
        return ("push", "c/v1", threshold(7).replace("THRESHOLD = 0'", "THRESHOLD = 3'"), {"force": True})
    return ("rollback", "", "", {"to": "base"})


def act(box: Box, operation: str, reference: str, script: str, args: dict) -> dict:
    if operation == "push":
        return box.push(reference, script, **args)
    return box.ask("rollback", **args)


@pytest.mark.parametrize(
    ("kind", "following"),
    [(kind, "outcome") for kind in ("first", "staged", "diff", "live", "stack", "forced", "rollback")]
    + [(kind, "status") for kind in ("live", "stack", "rollback")],
)
def test_killed_at_any_step_leaves_old_or_new(tmp_path, kind, following):
    """At each boundary in turn: SIGKILL, one more command of any kind, and the tree is exactly one of the two releases
    - contents, modes, owners, links and folders - as `outcome` says."""
    box = Box(tmp_path)
    step = prepare(box, kind)
    edited = everything(box.package)
    start = box.ask("history")["release"] or 0
    seen = []
    for at in range(1, 200):
        transaction = f"the-one-{at}"
        try:
            result = act(box, *step[:3], {**step[3], "crash_at": at, "transaction": transaction})
        except LinkLost:
            first = box.ask(following, transaction=transaction)
            answer = first if following == "outcome" else box.ask("outcome", transaction=transaction)
            now = everything(box.package)
            if answer["outcome"] == "committed":
                seen.append("new")
                final = now
                assert answer["release"] == box.ask("history")["release"] != start
                assert box.ask("status")["drift"] == []
                assert box.ask("rollback", to=start)["status"] == "rolled_back"
            else:
                assert answer["outcome"] == "not-committed"
                seen.append("old")
            # Back at the release before; forced: with or without the hand-made edit, which lies in displaced/ then.
            expected = dict(edited)
            if kind == "forced" and everything(box.package) != expected:
                expected["srt/args.py"] = (*expected["srt/args.py"][:-1], threshold_text(3))
                kept = list((tmp_path / "state dir/displaced").rglob("args.py"))
                assert b"BY = 'hand'\n" in [path.read_bytes() for path in kept]
                assert expected == everything(box.package), at
                (box.package / "srt/args.py").write_text("BY = 'hand'\n")
            else:
                assert expected == everything(box.package), at
            for name in ("journal.json", "staging"):
                assert not (tmp_path / "state dir" / name).exists()
            assert not list(tmp_path.rglob(".deployctl-*")), at
            continue
        assert result["exit"] == 0, result
        assert sorted(set(seen)) == ["new", "old"]
        assert seen == sorted(seen, reverse=True), "once committed, always committed"
        assert everything(box.package) == final
        assert at > 8
        return
    pytest.fail("the transaction never came to its end")


def threshold_text(value: int) -> bytes:
    return f"THRESHOLD = {value}\n\n\ndef threshold():\n    return THRESHOLD\n".encode()


@pytest.mark.parametrize("kind", ["stack", "rollback"])
def test_killed_during_the_recovery_too(tmp_path, kind):
    """A recovery that is killed, at any of its own boundaries, is done again by the next command."""
    box = Box(tmp_path)
    step = prepare(box, kind)
    before = everything(box.package)
    for first in range(1, 60):
        with pytest.raises(LinkLost):
            act(box, *step[:3], {**step[3], "crash_at": first, "transaction": f"f-{first}"})
        if everything(box.package) != before:
            break  # the first boundary behind a change of the tree
    for at in range(1, 60):
        box.ask("history")
        with pytest.raises(LinkLost):
            act(box, *step[:3], {**step[3], "crash_at": first + 1, "transaction": f"t-{at}"})
        assert everything(box.package) != before
        try:
            box.ask("history", crash_at=at)
        except LinkLost:
            box.ask("history")
            assert before == everything(box.package)
            continue
        assert before == everything(box.package)
        assert at > 2
        return
    pytest.fail("the recovery never came to its end")


def test_killed_at_any_moment_from_outside(tmp_path):
    """SIGKILL at moments that nobody chose: the tree is old or new, and the outcome says which."""
    box = Box(tmp_path)
    step = prepare(box, "stack")
    before = everything(box.package)
    start = box.ask("history")["release"]
    began = time.monotonic()
    assert act(box, *step[:3], {**step[3], "transaction": "whole"})["status"] == "pushed"
    whole_s = time.monotonic() - began
    after = everything(box.package)
    box.ask("rollback", to=start)
    outcomes = set()
    for number in range(12):
        transaction = f"killed-{number}"
        pid = os.fork()
        if pid == 0:  # pragma: no cover - the child is killed, or leaves by _exit
            try:
                act(box, *step[:3], {**step[3], "transaction": transaction})
            finally:
                os._exit(0)
        time.sleep(whole_s * (number + 1) / 13)
        victims = agents_below(pid)
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        os.waitpid(pid, 0)
        answer = box.ask("outcome", transaction=transaction)["outcome"]
        outcomes.add(answer)
        assert {"committed": after, "not-committed": before}[answer] == everything(box.package)
        box.ask("rollback", to=start)
        assert before == everything(box.package)
    assert "not-committed" in outcomes


def agents_below(pid: int) -> list[int]:
    """The children of a process that are agents (its patch scripts are theirs, not its)."""
    listing = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(word) for word in listing.stdout.split()]


def test_a_live_script_that_outlives_its_agent_is_ended(box):
    """The agent is killed while its live script waits: the next command ends the script before it puts the tree back,
    so that nothing changes later."""
    before = everything(box.package)
    flag, done = box.root / "started", box.root / "wrote"
    script = (
        f"import os, pathlib, signal, time\nroot = pathlib.Path({str(box.package)!r})\n"
        "(root / 'srt/args.py').write_text('HALF = 1\\n')\n"
        "signal.signal(signal.SIGPIPE, signal.SIG_IGN)\n"
        f"pathlib.Path({str(flag)!r}).write_text(str(os.getppid()) + ' ' + str(os.getpid()))\n"
        "time.sleep(3)\n"
        "(root / 'srt/args.py').write_text('LATE = 1\\n')\n"
        f"pathlib.Path({str(done)!r}).write_text('x')\n"
    )
    child = os.fork()
    if child == 0:  # pragma: no cover - see above
        try:
            box.push("a/v1", script)
        finally:
            os._exit(0)
    deadline = time.monotonic() + 20
    while not (flag.exists() and " " in flag.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    agent, script_pid = map(int, flag.read_text().split())
    os.kill(agent, signal.SIGKILL)
    os.waitpid(child, 0)
    recovered = box.ask("history")
    assert recovered["release"] == 0
    assert before == everything(box.package)
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(script_pid)], capture_output=True, text=True).stdout
    assert state.strip()[:1] in ("", "Z")
    assert not done.exists()
    events = [event for event in box.events if event["event"] == "recovered"]
    assert [("before", "ann@example.org", "push")] == [(e["to"], e["operator"], e["command"]) for e in events]
