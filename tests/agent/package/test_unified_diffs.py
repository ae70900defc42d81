"""Diffs apply exactly, or say what does not fit."""

import difflib
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployctl.agent import unified
from deployctl.agent.failure import Failure

LINE = st.sampled_from([b"a", b"b", b"", b"\r", b"a\r", b"-- x", b"++ y", b"\\ z", b"@@ -1 +1 @@", b" c", b"\xff\t"])
TEXT = st.builds(
    lambda lines, ended: b"\n".join(lines) + (b"\n" if ended and lines else b""),
    st.lists(LINE, max_size=14),
    st.booleans(),
)
OLD = b"one\ntwo\nthree\nfour\nfive\n"
METADATA = b'# /// deployctl\n# package = "sglang"\n# ///\nFrom: Ann\n---\n x | 2 +-\n'


def applied(old, diff):
    """What a diff of one file makes of `old`."""
    (file_patch,) = unified.parse(diff)
    return unified.apply(old, file_patch, "x.py")


def refused(diff, old=OLD):
    """The failure of a diff that must not apply."""
    with pytest.raises(Failure) as caught:
        applied(old, diff)
    assert caught.value.hint
    assert 1 == caught.value.exit_code
    return caught.value


def diff_command(argv, old, new):
    """The output of a real diff program on two files."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "a").mkdir()
        Path(folder, "b").mkdir()
        Path(folder, "a/x.py").write_bytes(old)
        Path(folder, "b/x.py").write_bytes(new)
        done = subprocess.run([*argv, "a/x.py", "b/x.py"], cwd=folder, capture_output=True, check=False)
        assert done.returncode in (0, 1), done.stderr
        return done.stdout


@settings(max_examples=60, deadline=None)
@given(TEXT, TEXT, st.sampled_from([0, 1, 3]))
def test_what_diff_and_git_make_applies_exactly(old, new, context):
    """Old text plus the diff of diff -u or git is the new text, byte for byte: any line ends, with and without the last
    newline, lines that look like diff syntax.
    """
    for argv in (
        ["diff", "-a", f"-U{context}"],
        ["git", "diff", "--no-index", "--no-ext-diff", "-a", f"-U{context}"],
    ):
        diff = diff_command(argv, old, new)
        if old != new:
            assert new == applied(old, METADATA + diff)


@settings(max_examples=200, deadline=None)
@given(TEXT, TEXT)
def test_what_difflib_makes_applies_exactly(old, new):
    """The same for Python's difflib, which writes no marker for a missing last newline (so both texts have one)."""
    sides = [text.decode("latin-1").rstrip("\n").split("\n") for text in (old, new)]
    lines = list(difflib.unified_diff(*sides, "a/x.py", "b/x.py", lineterm=""))
    if lines:
        diff = "\n".join(lines).encode("latin-1") + b"\n"
        expected = "\n".join(sides[1]).encode("latin-1") + b"\n"
        assert expected == applied("\n".join(sides[0]).encode("latin-1") + b"\n", diff)


@settings(max_examples=100, deadline=None)
@given(TEXT, TEXT, TEXT)
def test_another_file_is_refused_or_patched_exactly_in_place(old, new, other):
    """On a file other than its own a diff either fails, or changes nothing but the very lines that its hunks hold."""
    diff = diff_command(["diff", "-a", "-U1"], old, new)
    if not diff:
        return
    (file_patch,) = unified.parse(diff)
    try:
        result = unified.apply(other, file_patch, "x.py")
    except Failure as failure:
        assert failure.kind == "hunk-failed"
        return
    back = diff_command(["diff", "-a", "-U1"], new, old)
    (reverse,) = unified.parse(back)
    assert other == unified.apply(result, reverse, "x.py")


PIECE = st.sampled_from(
    [
        b"--- a/x.py", b"+++ b/x.py", b"--- /dev/null", b"+++ /dev/null", b"@@ -1 +1 @@", b"@@ -0,0 +1,2 @@", b"@@ -1,2 +1 @@",
        b"-a", b"+b", b" c", b"", b"\\ No newline at end of file", b"diff --git a/x.py b/x.py", b"new file mode 100755",
        b"deleted file mode 100644", b"index 1..2", b"-- ", b"@@ x", b'--- "a', b"diff --git ", b"\r", b"--- x\r", b"+++ x\r",
    ]
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(PIECE, max_size=12), st.none() | TEXT)
def test_any_text_is_read_or_refused(pieces, old):
    """Whatever the diff holds, the answer is new content or a failure in words, never another exception."""
    try:
        files = unified.parse(b"\n".join(pieces))
        unified.target_paths(files, "sglang", lambda path: old is not None)
        for file_patch in files:
            unified.apply(old, file_patch, "x.py")
    except Failure as failure:
        assert failure.kind in ("bad-diff", "hunk-failed", "crlf")
        assert failure.hint


def test_a_misfit_shows_the_hunk_and_the_real_lines():
    """The user sees what the diff wanted and what the file holds, and where both are."""
    failure = refused(b"--- a/x.py\n+++ b/x.py\n@@ -2,2 +2,2 @@ def f():\n two\n-THREE\n+drei\n")
    assert "hunk-failed" == failure.kind
    for part in ("x.py line 2", "@@ -2,2 +2,2 @@ def f():", "line 3 of the diff", "| -THREE", "| three"):
        assert part in failure.message


def test_no_search_for_an_offset():
    """A hunk that fits one line further down does not fit."""
    assert "does not fit" in refused(b"--- x.py\n+++ x.py\n@@ -1,2 +1,2 @@\n two\n-three\n+drei\n").message


@pytest.mark.parametrize(
    ("hunks", "words"),
    [
        (b"@@ -100,0 +101 @@\n+x\n", "has only 5 lines"),
        (b"@@ -2 +2 @@\n-two\n+zwei\n@@ -1 +1 @@\n-one\n+eins\n", "overlaps"),
        (b"@@ -2 +2 @@\n-two\n+zwei\n\\ No newline at end of file\n", "goes on"),
        (b"@@ -5 +5 @@\n-five\n\\ No newline at end of file\n+six\n", "newline at the end of the file differs"),
        (b"@@ -2 +2 @@\n-two\r\n+zwei\r\n", "line ends differ: the diff has CRLF"),
    ],
)
def test_what_does_not_fit_is_named(hunks, words):
    """Each kind of misfit has its own words."""
    assert words in refused(b"--- x.py\n+++ x.py\n" + hunks).message


def test_two_hunks_after_the_end_without_newline():
    """Nothing may follow a last line that has no newline."""
    diff = b"--- x\n+++ x\n@@ -5 +5 @@\n-five\n+5\n\\ No newline at end of file\n@@ -5,0 +6 @@\n+6\n"
    assert "goes on" in refused(diff).message


@pytest.mark.parametrize(
    ("diff", "words", "line"),
    [
        (b"nothing here\n", "no file in this diff", 1),
        (b"", "no file in this diff", 1),
        (b"@@ -1 +1 @@\n-a\n+b\n", "without the lines", 1),
        (b"--- x\n+++ x\n", "no hunk for x", 1),
        (b"--- /dev/null\n+++ /dev/null\n@@ -1 +1 @@\n-a\n+b\n", "both sides", 1),
        (b"--- x\n+++ x\n@@ -1,x +1 @@\n-a\n+b\n", "not a hunk header", 3),
        (b"--- x\n+++ x\n@@ -0,1 +1 @@\n-a\n+b\n", "begin at 1", 3),
        (b"--- x\n+++ x\n@@ -1,3 +1,3 @@\n-a\n+b\n", "cut off", 3),
        (b"--- x\n+++ x\n@@ -1,3 +1,3 @@\n-a\n+b\nhello\n", "fewer lines", 6),
        (b"--- x\n+++ x\n@@ -1,2 +1 @@\n a\n b\n", "more lines", 5),
        (b"--- x\n+++ x\n@@ -1 +1 @@\n-a\n+b\n+c\n", "more lines", 6),
        (b"GIT binary patch\nliteral 0\n", "binary", 1),
        (b"Binary files a/x and b/x differ\n", "binary", 1),
        (b"diff --git a/x b/x\nindex 1..2 100644\nBinary files a/x and b/x differ\n", "binary", 3),
        (b"diff --git a/x b/y\nsimilarity index 90%\nrename from x\nrename to y\n", "--no-renames", 3),
        (b"diff --git a/x b/x\nold mode 100644\nnew mode 100755\n", "mode changes", 2),
        (b"diff --git a/x b/x\nnew file mode 120000\nindex 0..1\n", "symbolic link", 2),
        (b"diff --git a/x b/x\nnew file mode 160000\nindex 0..1\n", "submodule", 2),
        (b"diff --git a/x y b/x\nnew file mode 100644\nindex 0..1\n", "cannot be told", 1),
        (b"diff --cc x\nindex 1,2..3\n", "merge", 1),
        (b"Only in b: new.py\ndiff -r a b\n", "new.py", 1),
        (b"--- x\n+++ x\n@@ -1 +1 @@\n-a\n+b\nOnly in b/srt: new.py\n", "diff -N", 6),
    ],
)
def test_what_cannot_be_read_is_refused_by_line(diff, words, line):
    """A damaged or unsupported diff is refused, with the line that says so."""
    with pytest.raises(Failure) as caught:
        unified.parse(diff)
    assert words in caught.value.message
    assert f"line {line}:" in caught.value.message
    assert "bad-diff" == caught.value.kind


def test_prose_in_the_preamble_is_no_syntax():
    """A commit message may speak of renames, modes and what is only in one place."""
    prose = b"rename from x to y\nold mode was wrong\nOnly in eager mode: graphs\n+ list\n- list\n"
    diff = prose + b"--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-one\n+eins\n-- \n2.39.5\n"
    assert b"eins\n" == applied(b"one\n", diff)


def test_crlf_file_keeps_its_line_ends():
    """A diff with LF headers and CRLF content is that of a CRLF file."""
    diff = b"--- a/x.py\n+++ b/x.py\n@@ -1,2 +1,2 @@\n-one\r\n+eins\r\n two\r\n"
    assert b"eins\r\ntwo\r\n" == applied(b"one\r\ntwo\r\n", diff)


def test_a_converted_diff_fits_a_crlf_file_and_no_other():
    """A diff whose own headers are CRLF was converted as a whole: on an LF file, or a new one, it is refused as CRLF."""
    diff = b"--- a/x.py\n+++ b/x.py\n@@ -1,0 +2 @@\n+two\n".replace(b"\n", b"\r\n")
    assert b"one\r\ntwo\r\n" == applied(b"one\r\n", diff)
    failure = refused(diff, b"one\n")
    assert ("crlf", True) == (failure.kind, "CRLF" in failure.message)
    new = b"--- /dev/null\n+++ b/x.py\n@@ -0,0 +1 @@\n+two\n".replace(b"\n", b"\r\n")
    assert "crlf" == refused(new, None).kind


@pytest.mark.parametrize("flags", [["diff", "-urN"], ["git", "diff", "--no-index", "--no-renames", "--no-prefix"]])
def test_files_made_and_removed(tmp_path, flags):
    """New and removed files, empty ones and executable ones included, as diff -N and git write them."""
    for side in ("a", "b"):
        (tmp_path / side / "srt").mkdir(parents=True)
    (tmp_path / "a/srt/gone é.py").write_text("old\n")
    (tmp_path / "b/srt/new file.py").write_text("new\n")
    (tmp_path / "b/srt/new file.py").chmod(0o755)
    (tmp_path / "a/srt/emptied.py").write_text("old\n")
    (tmp_path / "b/srt/emptied.py").write_text("")
    empties = flags[0] == "git"
    if empties:
        (tmp_path / "b/srt/__init__.py").write_text("")
        (tmp_path / "a/srt/empty é.py").write_text("")
    diff = subprocess.run([*flags, "a", "b"], cwd=tmp_path, capture_output=True, check=False).stdout
    files = unified.parse(diff)
    old = {"srt/gone é.py": b"old\n", "srt/emptied.py": b"old\n", "srt/empty é.py": b""}
    paths = unified.target_paths(files, "sglang", old.__contains__)
    result = {path: unified.apply(old.get(path), one, path) for path, one in zip(paths, files, strict=True)}
    expected = {"srt/gone é.py": None, "srt/new file.py": b"new\n", "srt/emptied.py": b""}
    if empties:
        expected.update({"srt/__init__.py": b"", "srt/empty é.py": None})
    assert expected == result
    modes = {path: one.mode for path, one in zip(paths, files, strict=True)}
    assert (0o755 if empties else None) == modes["srt/new file.py"]


def test_an_emptied_file_is_not_a_removed_one():
    """diff -N tells the two apart by the time stamp alone."""
    body = b"--- a/x.py\t2026-01-02 03:04:05.0 +0000\n+++ b/x.py\t%s 00:00:00.0 +0000\n@@ -1 +0,0 @@\n-one\n"
    assert b"" == applied(b"one\n", body % b"2026-01-02")
    assert None is applied(b"one\n", body % b"1970-01-01")


def test_creation_and_deletion_need_the_file_as_the_diff_says():
    """A file to be created must not exist, one to be changed must, one to be deleted must hold nothing else."""
    create = b"--- /dev/null\n+++ b/x.py\n@@ -0,0 +1 @@\n+x\n"
    assert "exists" in refused(create).message
    assert "does not exist" in refused(b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n", None).message
    assert "other lines" in refused(b"--- a/x.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-one\n").message


def test_names_in_gits_quoting():
    """git quotes names with escapes; a name with no --- line is taken from its first line, quoted or not."""
    quoted = b'--- "a/t\\303\\251 \\"q\\"\\tx.py"\n+++ "b/t\\303\\251 \\"q\\"\\tx.py"\n@@ -1 +1 @@\n-a\n+b\n'
    assert 'b/té "q"\tx.py' == unified.parse(quoted)[0].new
    empty = b"diff --git x/y.py x/y.py\nnew file mode 100644\nindex 000..e69\ndiff --git a/z b/z\ndeleted file mode 100644\n"
    files = unified.parse(empty)
    assert [(None, "x/y.py"), ("b/z", None)] == [(one.old, one.new) for one in files]


EXISTING = {"srt/args.py", "sglang/inner.py", "a/letter.py", "version.py"}


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("srt/args.py", "srt/args.py"),
        ("b/srt/args.py", "srt/args.py"),
        ("w/srt/args.py", "srt/args.py"),
        ("./srt/args.py", "srt/args.py"),
        ("sglang/srt/args.py", "srt/args.py"),
        ("b/python/sglang/srt/args.py", "srt/args.py"),
        ("b/sglang/inner.py", "sglang/inner.py"),
        ("b/python/sglang/sglang/inner.py", "sglang/inner.py"),
        ("a/letter.py", "a/letter.py"),
        ("b/a/letter.py", "a/letter.py"),
    ],
)
def test_ways_to_write_a_path(name, path):
    """Paths relative to the package, to its parent and to a source tree, with and without prefix."""
    diff = b"--- %s\n+++ %s\n@@ -1 +1 @@\n-a\n+b\n" % (name.encode(), name.encode())
    assert [path] == unified.target_paths(unified.parse(diff), "sglang", EXISTING.__contains__)


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "a/../../x.py", "b/..", "x\\y.py", "b/.git/hooks/x", "__pycache__/x.pyc", "nowhere.py", "./"],
)
def test_paths_outside_are_refused(name):
    """Absolute paths, climbing ones, and files that the package does not have."""
    diff = b"--- %s\n+++ %s\n@@ -1 +1 @@\n-a\n+b\n" % (name.encode(), name.encode())
    with pytest.raises(Failure) as caught:
        unified.target_paths(unified.parse(diff), "sglang", EXISTING.__contains__)
    assert "bad-diff" == caught.value.kind
    assert name in caught.value.message


def file(old, new):
    return b"--- %s\n+++ %s\n@@ -%s +1 @@\n%s+b\n" % (
        (old.encode(), new.encode(), b"0,0", b"") if old == "/dev/null" else (old.encode(), new.encode(), b"1", b"-a\n")
    )


def test_new_files_are_read_as_the_others_are():
    """A new file takes the layout of the files that exist; beside a source tree's package it is refused, not put in."""
    rooted = file("a/python/sglang/srt/args.py", "b/python/sglang/srt/args.py")
    new = file("/dev/null", "b/python/sglang/srt/new.py")
    paths = unified.target_paths(unified.parse(rooted + new), "sglang", EXISTING.__contains__)
    assert ["srt/args.py", "srt/new.py"] == paths
    with pytest.raises(Failure, match=r"test/test_new\.py, which lies outside"):
        unified.target_paths(
            unified.parse(rooted + file("/dev/null", "b/test/test_new.py")), "sglang", EXISTING.__contains__
        )
    own = file("a/srt/args.py", "b/srt/args.py") + file("/dev/null", "b/srt/new.py")
    assert ["srt/args.py", "srt/new.py"] == unified.target_paths(unified.parse(own), "sglang", EXISTING.__contains__)


def test_a_later_part_may_change_what_an_earlier_one_made():
    """Several mails in one file: created in the first, changed in the second."""
    diff = file("/dev/null", "b/srt/new.py") + file("a/srt/new.py", "b/srt/new.py")
    assert ["srt/new.py"] * 2 == unified.target_paths(unified.parse(diff), "sglang", EXISTING.__contains__)


def test_the_side_that_exists_is_meant():
    """`diff -u args.py args.new.py` and `diff -u args.py.orig args.py` both mean args.py."""
    for old, new in [("srt/args.py", "srt/args.new.py"), ("srt/args.py.orig", "srt/args.py")]:
        assert ["srt/args.py"] == unified.target_paths(unified.parse(file(old, new)), "sglang", EXISTING.__contains__)
