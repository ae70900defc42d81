"""Diffs through the whole agent: what git writes is what the host gets."""

import subprocess

import pytest


@pytest.fixture
def work(box, tmp_path):
    """A clone of the package in a source tree, as its developer has it."""
    root = tmp_path / "clone é"
    (root / "python").mkdir(parents=True)
    subprocess.run(["cp", "-r", box.package, root / "python/fakesgl"], check=True)
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=A", "-c", "user.email=a@b.c", "commit", "-qm", "x"]):
        subprocess.run(["git", *words], cwd=root, check=True)
    return root


def git_diff(root):
    subprocess.run(["git", "add", "-N", "."], cwd=root, check=True)
    words = ["git", "diff", "--no-renames", "HEAD"]
    return subprocess.run(words, cwd=root, check=True, capture_output=True, text=True).stdout


def test_new_empty_executable_changed_and_removed(box, work):
    """A developer's git diff makes the host's package what the clone is, with the mode of a new file; rolled back it is
    what it was.
    """
    before = box.tree()
    source = work / "python/fakesgl"
    (source / "srt/args.py").write_text("THRESHOLD = 4\n\n\ndef threshold():\n    return THRESHOLD\n")
    (source / "srt/new").mkdir()
    (source / "srt/new/__init__.py").write_text("")
    (source / "srt/new/tool é x.py").write_text("#!/usr/bin/env python3\n")
    (source / "srt/new/tool é x.py").chmod(0o755)
    (source / "srt/data.json").unlink()
    result = box.push("series/v1", git_diff(work), filename="v1.patch")
    assert "pushed" == result["status"], result
    expected = {path: (source / path).read_text() for path in before if path != "srt/data.json"}
    expected |= {"srt/new/__init__.py": "", "srt/new/tool é x.py": "#!/usr/bin/env python3\n"}
    assert expected == box.tree()
    assert (box.package / "srt/new/tool é x.py").stat().st_mode & 0o111
    result = box.ask("rollback", to="base", transaction="t2")
    assert "rolled_back" == result["status"], result
    assert before == box.tree()


def test_files_beside_the_package_stop_it(box, work):
    """A diff that also changes what is not the package is refused, and nothing is changed."""
    before = box.tree()
    (work / "python/fakesgl/srt/args.py").write_text("THRESHOLD = 4\n")
    (work / "test").mkdir()
    (work / "test/test_args.py").write_text("x = 1\n")
    result = box.push("series/v1", git_diff(work), filename="v1.patch")
    assert ("failed", 1, "bad-diff") == (result["status"], result["exit"], result["error"]["kind"])
    assert "test/test_args.py" in result["error"]["message"]
    assert before == box.tree()


def test_a_failing_import_shows_the_patched_line(box, work):
    """The tree is restored, and the line at fault is shown."""
    before = box.tree()
    (work / "python/fakesgl/srt/args.py").write_text("THRESHOLD = missing\n")
    result = box.push("series/v1", git_diff(work), filename="v1.patch")
    assert ("restored", "import") == (result["status"], result["error"]["kind"])
    assert "THRESHOLD = missing" in result["error"]["message"]
    assert "<-- patched file" in result["error"]["message"]
    assert before == box.tree()
