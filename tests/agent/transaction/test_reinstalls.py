"""The package is installed anew between two commands: by pip, or by git in a work tree."""

import os
import subprocess

import pytest
from support import FILES, edit, everything, install, perform, perform_push, threshold

from deployctl.errors import LinkLost

NEW = {**FILES, "version.py": '__version__ = "1.3.0"\n', "srt/fresh.py": "F = 1\n"}


def reinstall(near, files=NEW, version="1.3.0"):
    """As pip does it: what the old RECORD lists goes, then the new files come."""
    for path in [path for path in near.package.rglob("*") if path.is_file()]:
        path.unlink()
    for old in near.package.parent.glob("fakesgl-*.dist-info"):
        for path in old.iterdir():
            path.unlink()
        old.rmdir()
    install(near.python, files, version=version)


def test_a_new_install_is_a_new_base(near):
    """Said, begun anew; the old releases stay in the history and cannot be rolled back to."""
    perform_push(near, "a/v1", threshold(5))
    reinstall(near)
    result = perform_push(near, "a/v2", threshold(6))
    assert ("pushed", 2, ["a/v2"], "1.3.0") == tuple(result[key] for key in ("status", "release", "patches", "version"))
    assert ["1.2.3 to 1.3.0", "without a/v1 from now on"] == [
        word for word in ("1.2.3 to 1.3.0", "without a/v1 from now on") if word in result["warnings"][0]
    ]
    refused = perform(near, "rollback", to=1, transaction="x")
    assert (2, "other-base") == (refused["exit"], refused["error"]["kind"])
    assert [(0, False), (1, True), (2, False)] == [
        (entry["release"], entry["other_base"]) for entry in perform(near, "history")["releases"]
    ]
    assert 0 == perform(near, "rollback", transaction="y")["release"]
    assert "F = 1\n" == (near.package / "srt/fresh.py").read_text()


def test_rollback_after_a_new_install(near):
    """The package is at its new base already: nothing to roll back, and nothing of the old version is brought back."""
    perform_push(near, "a/v1", threshold(5))
    reinstall(near)
    fresh = everything(near.package)
    refused = perform(near, "rollback", transaction="x")
    assert "nothing-to-roll-back" == refused["error"]["kind"]
    assert "installed anew (1.2.3 to 1.3.0)" in refused["warnings"][0]
    assert fresh == everything(near.package)
    assert "unchanged" == perform(near, "rollback", to="base", transaction="y")["status"]


def test_a_new_install_that_was_edited_is_drift(near):
    """Not overwritten, not even with --force, which has no release of this version to go to; --adopt takes it."""
    perform_push(near, "a/v1", threshold(5))
    reinstall(near)
    (near.package / "srt/worker.py").write_text("BY = 'hand'\n")
    for args in ({}, {"force": True}):
        result = perform_push(near, "a/v2", threshold(6), **args)
        assert (9, ["srt/worker.py"]) == (result["exit"], [entry["path"] for entry in result["drift"]])
        assert "--adopt" in result["error"]["hint"]
    assert "pushed" == perform_push(near, "a/v2", threshold(6), adopt=True)["status"]
    assert "BY = 'hand'\n" == (near.package / "srt/worker.py").read_text()


def test_the_same_again_is_the_same_base(near):
    """The same files installed again at the base: nothing is new, and a later edit is an edit, not an install."""
    perform_push(near, "a/v1", threshold(5))
    perform(near, "rollback", transaction="x")
    reinstall(near, FILES, "1.2.3")
    assert ("pushed", 2) == tuple(perform_push(near, "a/v1", threshold(6))[key] for key in ("status", "release"))
    (near.package / "srt/worker.py").write_text("BY = 'hand'\n")
    result = perform_push(near, "b/v1", edit(["version.py"], "(root / 'version.py').write_text('')\n"), force=True)
    assert "pushed" == result["status"], result


@pytest.mark.parametrize("back_to", [0, 1])
def test_the_same_wheel_again_does_not_lose_the_stack(near, back_to):
    """Installed again under patches, the content is that of a release that is known: the base stays, a push does not
    silently leave the stack behind, and --force brings the release back."""
    perform_push(near, "a/v1", threshold(5))
    perform_push(near, "b/v1", edit(["srt/new.py"], "(root / 'srt/new.py').write_text('N = 1\\n')\n"))
    patched = everything(near.package)
    text = (near.package / "srt/args.py").read_text()
    reinstall(near, FILES, "1.2.3")
    if back_to:
        (near.package / "srt/args.py").write_text(text)
    for refused in (
        perform_push(near, "c/v1", edit(["version.py"], "(root / 'version.py').write_text('')\n")),
        perform(near, "rollback", to=1, transaction="x"),
    ):
        assert (9, "drift") == (refused["exit"], refused["error"]["kind"]), refused
        assert "put back from outside" in refused["error"]["message"]
    done = perform(near, "rollback", to=2, transaction="y", force=True)
    assert ("rolled_back", 2, ["a/v1", "b/v1"]) == tuple(done[key] for key in ("status", "release", "patches"))
    assert patched == everything(near.package)


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_package_put_back_to_an_older_release_is_said_so(near, dry_run):
    """A container made anew from its image: same fingerprint, base content. It is drift, but nobody's edit: --force
    brings the release back and has nothing to keep; the same with one release's files copied over another's."""
    perform_push(near, "a/v1", threshold(5))
    perform_push(near, "b/v1", edit(["srt/new.py"], "(root / 'srt/new.py').write_text('N = 1\\n')\n"))
    (near.package / "srt/new.py").unlink()
    for release, words in ((1, "the package is release 1 again"), (0, "the package is its base again")):
        if release == 0:
            (near.package / "srt/args.py").write_text(FILES["srt/args.py"])
        before = everything(near.package)
        for refused in (
            perform_push(near, "b/v1", edit(["srt/new.py"], "(root / 'srt/new.py').write_text('N = 1\\n')\n")),
            perform(near, "rollback", to=1, transaction="x"),
        ):
            assert (9, "drift") == (refused["exit"], refused["error"]["kind"])
            assert words in refused["error"]["message"]
            assert "by hand" not in refused["error"]["message"]
            assert "--force" in refused["error"]["hint"]
        assert before == everything(near.package)
    done = perform(near, "rollback", to=2, transaction="y", force=True, dry_run=dry_run)
    assert ("planned" if dry_run else "rolled_back", None) == (done["status"], done["displaced"])
    assert ["the package was at release 0 again, put back from outside"] == done["warnings"]
    assert dry_run == (before == everything(near.package))
    if not dry_run:
        assert [] == perform(near, "status")["drift"]
        assert "N = 1\n" == (near.package / "srt/new.py").read_text()
    (near.package / "srt/args.py").write_text("BY = 'hand'\n")
    said = "2 files differ from release 2, 1 of them as in the base" if dry_run else "1 file differs from release 2"
    for refused in (perform(near, "rollback", transaction="z"), perform(near, "status", check=True)):
        assert (9, said) == (refused["exit"], refused["error"]["message"].partition(":")[0])


def test_status_says_what_is_known_of_a_package_that_was_put_back(near):
    """Installed again from outside, the files are as in the base: that is said, and not that anybody edited them."""
    perform_push(near, "a/v1", threshold(5))
    (near.package / "srt/args.py").write_text(FILES["srt/args.py"])
    found = perform(near, "status", check=True)
    assert (9, "1 file differs from release 1, all as in the base") == (found["exit"], found["error"]["message"])
    assert found["error"]["message"] == found["drift_summary"]
    assert [True] == [entry["found"] == entry["base"] for entry in found["drift"]]


def test_an_interrupted_push_does_not_undo_a_new_install(near):
    """Killed in the middle, then reinstalled by an operator who knew no better: the new version stays whole."""
    perform_push(near, "a/v1", threshold(5))
    kill_behind_the_first_change(near)
    reinstall(near)
    fresh = everything(near.package)
    assert 1 == perform(near, "history")["release"]
    assert ["reinstalled"] == [event["to"] for event in near.events if event["event"] == "recovered"]
    assert fresh == everything(near.package)
    assert "pushed" == perform_push(near, "a/v2", threshold(6))["status"]


def kill_behind_the_first_change(near):
    """A push killed when it has changed the tree and is not committed."""
    before = everything(near.package)
    script = edit(
        ["srt/args.py", "version.py"], "for p in ('srt/args.py', 'version.py'):\n    (root / p).write_text('K = 1')\n"
    )
    for at in range(1, 60):
        with pytest.raises(LinkLost):
            near.push("k/v1", script, transaction=f"killed-{at}", crash_at=at)
        if before != everything(near.package):
            return
        near.ask("history")


def test_an_interrupted_push_under_a_half_new_install_asks_for_help(near):
    """A new version over which the operator has also edited: refused with exit 8, and nothing is touched."""
    perform_push(near, "a/v1", threshold(5))
    kill_behind_the_first_change(near)
    reinstall(near)
    (near.package / "srt/worker.py").write_text("BY = 'hand'\n")
    mixed = everything(near.package)
    result = perform_push(near, "a/v2", threshold(6))
    assert (8, "needs-recovery") == (result["exit"], result["error"]["kind"])
    assert "srt/worker.py" in result["error"]["message"]
    assert "pip" in result["error"]["hint"]
    assert mixed == everything(near.package)
    reinstall(near)
    assert "pushed" == perform_push(near, "a/v2", threshold(6))["status"]


def test_an_interrupted_push_and_the_package_is_gone(near):
    """Uninstalled meanwhile: exit 8 that says so, until it is installed again."""
    perform_push(near, "a/v1", threshold(5))
    kill_behind_the_first_change(near)
    hidden = near.root / "hidden"
    near.package.rename(hidden)
    result = perform(near, "history")
    assert (8, "needs-recovery") == (result["exit"], result["error"]["kind"])
    assert str(near.package) in result["error"]["message"]
    hidden.rename(near.package)
    assert 1 == perform(near, "history")["release"]


def git(folder, *words):
    env = dict(os.environ, GIT_CONFIG_GLOBAL="/dev/null", GIT_CONFIG_SYSTEM="/dev/null")
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder), *words],
        check=True,
        capture_output=True,
        env=env,
    )


@pytest.fixture
def source(near):
    """The package as a git work tree that an editable install points to."""
    tree = near.root / "work tree"
    tree.mkdir()
    near.package.rename(tree / "fakesgl")
    for info in near.package.parent.glob("fakesgl-*.dist-info"):
        for path in info.iterdir():
            path.unlink()
        info.rmdir()
    (near.package.parent / "fakesgl.pth").write_text(str(tree) + "\n")
    near.package = tree / "fakesgl"
    git(tree, "init", "-q")
    git(tree, "add", "-A")
    git(tree, "commit", "-qm", "one")
    return near


def test_a_commit_of_something_else_is_no_new_install(source):
    """HEAD moves while the package does not: same base, and rollback still works."""
    before = everything(source.package)
    assert "pushed" == perform_push(source, "a/v1", threshold(5))["status"]
    (source.package.parent / "README").write_text("x")
    git(source.package.parent, "add", "README")
    git(source.package.parent, "commit", "-qm", "two")
    assert "rolled_back" == perform(source, "rollback", transaction="x")["status"]
    assert before == everything(source.package)


def test_an_interrupted_push_is_recovered_although_head_has_moved(source):
    """Only the transaction's own contents are there besides the release: they are put back."""
    perform_push(source, "a/v1", threshold(5))
    before = everything(source.package)
    kill_behind_the_first_change(source)
    (source.package.parent / "README").write_text("x")
    git(source.package.parent, "add", "README")
    git(source.package.parent, "commit", "-qm", "two")
    assert 1 == perform(source, "history")["release"]
    assert before == everything(source.package)


def test_edits_before_the_first_push_of_a_work_tree(source):
    """git's HEAD plays the part of the RECORD."""
    (source.package / "srt/args.py").write_text("MINE = 1\n")
    result = perform_push(source, "a/v1", threshold(5))
    assert (9, ["srt/args.py"]) == (result["exit"], [entry["path"] for entry in result["drift"]])
    assert "git's HEAD" in result["error"]["message"]


def test_another_package_folder_needs_another_state(near):
    """The same state directory for another interpreter's package is refused, naming both."""
    perform_push(near, "a/v1", threshold(5))
    other = near.root / "other"
    near.package.rename(other / "fakesgl" if other.mkdir() is None else other)
    (near.package.parent / "fakesgl.pth").write_text(str(other) + "\n")
    old, near.package = near.package, other / "fakesgl"
    result = perform_push(near, "a/v1", threshold(5))
    assert (2, "other-package") == (result["exit"], result["error"]["kind"])
    assert str(old) in result["error"]["message"]
    assert str(near.package) in result["error"]["message"]
