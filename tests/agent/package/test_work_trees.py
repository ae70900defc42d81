"""Source and editable installs: git's HEAD is what the package came as."""

import os
import shutil

import pytest
from installs import git, hashes, locate, write

from deployctl.agent import package
from deployctl.agent.failure import Failure


def test_work_tree(home, tree):
    """A source tree on the path: HEAD is its origin; ignored files and those outside the package do not count."""
    place = tree / "python/fakesgl"
    found = locate(tree / "python")
    assert (str(place), "source", str(tree), "1.2.3") == (found.directory, found.kind, found.git_root, found.version)
    assert [] == package.differing_from_origin(found, hashes(place))
    (place / "srt/args.py").write_text("edited\n")
    (place / "srt/new é.py").write_text("new\n")
    (place / "srt/data.json").unlink()
    (place / "built.so").write_text("")
    (tree / "README").write_text("y\n")
    git(tree, "mv", "python/fakesgl/srt/worker.py", "python/fakesgl/srt/moved.py")
    expected = ["srt/args.py", "srt/data.json", "srt/moved.py", "srt/new é.py", "srt/worker.py"]
    assert expected == package.differing_from_origin(found, hashes(place))
    git(tree, "commit", "-qam", "next")
    assert found.fingerprint != locate(tree / "python").fingerprint


def test_line_ends_that_git_converts_are_no_edit(home, tree):
    """core.autocrlf: CRLF on disk, LF in the repository."""
    git(tree, "config", "core.autocrlf", "true")
    place = tree / "python/fakesgl"
    (place / "srt/args.py").write_bytes((place / "srt/args.py").read_bytes().replace(b"\n", b"\r\n"))
    assert [] == package.differing_from_origin(locate(tree / "python"), hashes(place))


def test_the_work_tree_may_be_the_package(home, tmp_path):
    """The package's folder is the root of the work tree."""
    place = write(tmp_path / "fakesgl")
    git(tmp_path, "init", "-q", str(place))
    git(place, "add", ".")
    git(place, "commit", "-q", "-m", "base")
    (place / "srt/args.py").write_text("edited\n")
    found = locate(tmp_path)
    assert ["srt/args.py"] == package.differing_from_origin(found, hashes(place))


def test_a_legacy_editable_install(home, tree):
    """An egg-info beside the source makes it editable, and says its version."""
    info = tree / "python/fakesgl.egg-info"
    info.mkdir()
    (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: fakesgl\nVersion: 1.2.4.dev0\n")
    found = locate(tree / "python")
    assert ("editable", "1.2.4.dev0") == (found.kind, found.version)


def test_below_a_work_tree_that_does_not_track_it(home, tmp_path):
    """A virtual environment in a home directory under git is not that repository's."""
    git(tmp_path, "init", "-q", str(home))
    (home / "dotfile").write_text("x")
    git(home, "add", "dotfile")
    git(home, "commit", "-q", "-m", "dots")
    write(home / "env/site/fakesgl")
    assert "plain" == locate(home / "env/site").kind


def test_a_work_tree_of_another_user(home, tree):
    """Root may look at a user's tree, which git by itself refuses."""
    for path in [tree, *tree.rglob("*")]:
        os.chown(path, 12345, 12345)
    assert ("source", ()) == (locate(tree / "python").kind, locate(tree / "python").warnings[1:])


def test_a_hooks_environment_leads_nowhere_else(home, tree, monkeypatch):
    """GIT_DIR of a hook does not lead to another repository."""
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert str(tree) == locate(tree / "python").git_root


def test_git_that_cannot_read(home, tree, monkeypatch):
    """No git, or a broken repository: the package is plain, and that edits go unnoticed is said."""
    found = locate(tree / "python")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        bare = locate(tree / "python")
        with pytest.raises(Failure, match="git cannot compare") as caught:
            package.differing_from_origin(found, {})
        assert "git" == caught.value.kind
    assert "plain" == bare.kind
    assert "edits made before the first push are not noticed" in bare.warnings[-1]
    shutil.rmtree(tree / ".git/objects")
    assert "git cannot read the work tree" in locate(tree / "python").warnings[-1]


def test_git_that_hangs(home, tree, monkeypatch, tmp_path):
    """A git that does not end (a dead network file system) is cut off."""
    fake = tmp_path / "bin/git"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nexec sleep 600\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(package, "_GIT_DEADLINE_S", 0.2)
    assert "did not end" in locate(tree / "python").warnings[-1]
