"""push while others are there: their edits, Ctrl-C, a client that goes away, and hosts that wait for each other."""

from pathlib import Path

import pytest
from support import edit, everything, perform, perform_push, threshold

ARGS = "THRESHOLD = {}\n\n\ndef threshold():\n    return THRESHOLD\n"


def at_step(name: str, act):
    """An `on_event` that acts once, when a step begins."""
    done = []

    def hook(wire, event):
        if event["event"] == "step" and event["name"] == name and event["state"] == "start" and not done:
            done.append(1)
            act(wire)

    return hook


@pytest.mark.parametrize("operation", ["push", "rollback"])
def test_edits_by_hand_are_never_overwritten_silently(near, operation):
    """Drift stops push and rollback with the diff; --force keeps copies and says where."""
    perform_push(near, "a/v1", threshold(5))
    (near.package / "srt/args.py").write_text("BY = 'hand'\n")
    (near.package / "srt/added.bin").write_bytes(b"\0\xff")
    (near.package / "srt/data.json").unlink()
    edited = everything(near.package)

    def act(**args):
        if operation == "push":
            return perform_push(near, "b/v1", edit(["version.py"], "(root / 'version.py').write_text('V=1')\n"), **args)
        return perform(near, "rollback", **{"transaction": "back", **args})

    refused = act()
    assert (9, "drift", "drift") == (refused["exit"], refused["error"]["kind"], refused["status"])
    assert ["srt/added.bin", "srt/args.py", "srt/data.json"] == [entry["path"] for entry in refused["drift"]]
    assert "+BY = 'hand'\n" in refused["diff"]
    assert "Binary files" in refused["diff"]
    assert edited == everything(near.package)
    planned = act(force=True, dry_run=True)
    assert any("would be set aside" in text for text in planned["warnings"])
    assert edited == everything(near.package)
    done = act(force=True)
    assert 0 == done["exit"], done
    kept = Path(done["displaced"])
    assert any(str(kept) in text for text in done["warnings"])
    assert "BY = 'hand'\n" == (kept / "srt/args.py").read_text()
    assert b"\0\xff" == (kept / "srt/added.bin").read_bytes()
    assert not (near.package / "srt/added.bin").exists()
    assert (near.package / "srt/data.json").exists()
    assert ARGS.format(5 if operation == "push" else 0) == (near.package / "srt/args.py").read_text()


def test_a_forced_push_that_fails_before_the_swap_leaves_the_edits(near):
    """`failed` means that nothing had been swapped: hand-made edits stand where they stood."""
    perform_push(near, "a/v1", threshold(5))
    (near.package / "srt/worker.py").write_text("BY = 'hand'\n")
    edited = everything(near.package)
    result = perform_push(near, "b/v1", edit(["srt/args.py"], "sys.exit(1)\n"), force=True)
    assert "failed" == result["status"]
    assert edited == everything(near.package)


@pytest.mark.parametrize("step", ["run", "compile", "swap", "import", "commit"])
def test_an_edit_during_the_push_stops_it(near, step):
    """Somebody saves a file of the package while a push is on its way: the edit survives, in place or as a copy."""
    perform_push(near, "a/v1", threshold(5))
    mine = near.package / "srt/args.py"
    near.on_event = at_step(step, lambda _: mine.write_text("SAVED = 1\n"))
    result = perform_push(near, "a/v2", threshold(6))
    near.on_event = None
    kept = list((near.root / "state dir").rglob("displaced/*/srt/args.py"))
    if step in ("compile", "swap"):
        assert "failed" == result["status"]
    if step == "commit":
        assert "pushed" == result["status"]
    assert "SAVED = 1\n" in [mine.read_text(), *[path.read_text() for path in kept]]
    if kept:
        assert str(kept[0].parent.parent) == result["displaced"]


@pytest.mark.parametrize(
    ("step", "status", "code"),
    [("stage", "failed", 130), ("run", "failed", 130), ("import", "restored", 130), ("commit", "pushed", 0)],
)
def test_ctrl_c_is_all_or_nothing(near, step, status, code):
    """Cancelled before the commit: as before and exit 130; after it began: done."""
    before = everything(near.package)
    near.on_event = at_step(step, lambda wire: wire.cancelled.set())
    result = perform_push(near, "a/v1", threshold(5))
    assert (status, code) == (result["status"], result["exit"]), result
    assert (before == everything(near.package)) == (code == 130)
    assert not (near.root / "state dir/journal.json").exists()


def test_cancelled_while_the_script_runs(near):
    """Ctrl-C in a script that sleeps: the script ends, the lock is free, the files are as before."""
    before = everything(near.package)
    near.on_event = lambda wire, event: wire.cancelled.set() if event["event"] == "output" else None
    script = edit(
        ["srt/args.py"], "(root / 'srt/args.py').write_text('')\nprint('x', flush=True)\nimport time\ntime.sleep(60)\n"
    )
    result = perform_push(near, "a/v1", script)
    assert (130, "failed") == (result["exit"], result["status"])
    assert before == everything(near.package)
    near.on_event = None
    assert "pushed" == perform_push(near, "a/v1", threshold(5))["status"]


@pytest.mark.parametrize(
    ("answer", "status", "code", "kind"),
    [
        ({"control": "commit"}, "pushed", 0, None),
        ({"control": "abort", "reason": "gpu-2 failed"}, "restored", 1, "aborted"),
        ({"control": "abort"}, "restored", 1, "aborted"),
        (None, "restored", 1, "aborted"),
        ("cancel", "restored", 130, "interrupted"),
    ],
)
def test_with_several_hosts_the_commit_waits_for_the_word(near, answer, status, code, kind):
    """hold: prepared, then commit; abort, silence and a lost client restore."""
    before = everything(near.package)
    near.answer = None if answer == "cancel" else answer
    if answer == "cancel":
        near.on_event = lambda wire, event: wire.cancelled.set() if event["event"] == "prepared" else None
    result = perform_push(near, "a/v1", threshold(5), hold=True)
    assert (status, code, kind) == (result["status"], result["exit"], (result["error"] or {}).get("kind"))
    assert [1] == [event["release"] for event in near.events if event["event"] == "prepared"]
    assert (before == everything(near.package)) == (code != 0)
