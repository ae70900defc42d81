"""Kill the agent at every boundary of every kind of transaction: the next command finds exactly old or new."""

import pytest
from support import Box, edit, threshold

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
""".replace("\n\n\n", "\n \n \n")


def live(box: Box) -> str:
    """A script without metadata, with absolute paths, as people have them lying about."""
    return (
        f"import pathlib\nroot = pathlib.Path({str(box.package)!r})\n"
        "p = root / 'srt/worker.py'\np.write_text(p.read_text() + 'LIVE = 1\\n')\n"
        "(root / 'srt/extra.py').write_text('EXTRA = 1\\n')\n"
    )


def prepare(box: Box, kind: str):
    """Bring the box to the state before the transaction; returns (operation, reference, script, arguments)."""
    if kind == "staged":
        return ("push", "a/v1", ADD_AND_DELETE, {})
    if kind == "diff":
        return ("push", "a/v1", DIFF, {})
    if kind == "live":
        return ("push", "a/v1", live(box), {})
    assert box.push("a/v1", threshold(5), transaction="p1")["status"] == "pushed"
    assert box.push("b/v1", live(box), transaction="p2")["status"] == "pushed"
    if kind == "stack":
        return ("push", "a/v2", ADD_AND_DELETE, {})
    if kind == "forced":
        (box.package / "srt/args.py").write_text("BY = 'hand'\n")
        return ("push", "a/v2", ADD_AND_DELETE, {"force": True})
    return ("rollback", "", "", {"to": "base"})


def act(box: Box, operation: str, reference: str, script: str, args: dict) -> dict:
    if operation == "push":
        return box.push(reference, script, transaction="the-one", **args)
    return box.ask("rollback", transaction="the-one", **args)


@pytest.mark.parametrize("kind", ["staged", "diff", "live", "stack", "forced", "rollback"])
def test_killed_at_any_step_leaves_old_or_new(tmp_path, kind):
    """At each boundary in turn: SIGKILL, one more command, and the tree is one of the two releases, as reported."""
    box = Box(tmp_path)
    step = prepare(box, kind)
    edited = box.tree()
    expected_before = dict(edited)
    if kind == "forced":
        # Forced: the hand-made edit is set aside, and "old" means the release, not the edit.
        expected_before["srt/args.py"] = "THRESHOLD = 5\n\n\ndef threshold():\n    return THRESHOLD\n"
    seen = set()
    for at in range(1, 200):
        try:
            result = act(box, *step[:3], {**step[3], "crash_at": at})
        except LinkLost:
            answer = box.ask("outcome", transaction="the-one")
            now = box.tree()
            if answer["outcome"] == "committed":
                seen.add("new")
                back = box.ask("rollback", to=answer["release"] if step[0] == "push" else "base")
                assert back["status"] == "unchanged", back
                final = now
                act_back(box, kind)
            else:
                assert answer["outcome"] == "not-committed"
                assert now in (edited, expected_before), at
                seen.add("old")
            if kind == "forced":
                (box.package / "srt/args.py").write_text("BY = 'hand'\n")
            assert not (tmp_path / "state dir" / "journal.json").exists()
            assert not (tmp_path / "state dir" / "staging").exists()
            assert not list(box.package.rglob(".deployctl-*")), at
            continue
        assert result["exit"] == 0, result
        assert seen == {"old", "new"}
        assert box.tree() == final
        assert at > 8
        return
    pytest.fail("the transaction never came to its end")


def act_back(box: Box, kind: str) -> None:
    """From "new" back to the state before."""
    target = {"staged": "base", "diff": "base", "live": "base", "stack": 2, "forced": 2, "rollback": 2}[kind]
    result = box.ask("rollback", to=target)
    assert result["status"] == "rolled_back", result


def test_killed_during_the_recovery_too(box):
    """A recovery that is killed is done again by the next command."""
    before = box.tree()
    for at in range(1, 60):
        with pytest.raises(LinkLost):
            box.push("a/v1", ADD_AND_DELETE, crash_at=9)
        try:
            result = box.ask("history", crash_at=at)
        except LinkLost:
            continue
        assert result["release"] == 0
        assert box.tree() == before
        assert at > 2
        return
    pytest.fail("the recovery never came to its end")
