"""Attempts on two hosts: what they ran is compared by content, and nothing they say commands the terminal."""

import json

import pytest
from made_attempts import bench
from support import FILES, edit, threshold
from two_hosts import Two


@pytest.fixture
def two(tmp_path):
    two = Two(tmp_path, {"eagle3": ("server.py", 30000)})
    yield two
    two.end()


def test_the_same_patch_under_other_numbers_is_no_difference(two):
    """Release 1 there and release 2 here hold the same files: by content nothing differs."""
    one, other = two.boxes
    one.push("a/v1", threshold(5))
    one.push("a/v2", threshold(6), transaction="t2")
    other.push("b/v9", threshold(6))
    one.launch("x")
    other.launch("y")
    value = two.json("compare", "one:x", "two:y", "--patch-diff")
    assert ("", None) == (value["patch_diffs"][0]["diff"], value["patch_diffs"][0]["note"])
    assert {"x": "one", "y": "two"} == next(d["values"] for d in value["differences"] if d["name"] == "host")
    assert {"one", "two"} == set(value["hosts"])


def test_files_that_only_one_of_them_changes(two):
    """The other host is asked for its own text of them, pristine as it is there."""
    one, other = two.boxes
    one.push("n/v1", edit(["srt/new.py"], "(root / 'srt/new.py').write_text('N = 1\\n')\n"))
    other.push("a/v1", threshold(7))
    one.launch("x")
    other.launch("x")
    diff = two.json("compare", "one:x", "two:x", "--patch-diff")["patch_diffs"][0]["diff"]
    assert "-THRESHOLD = 0\n+THRESHOLD = 7\n" in diff
    assert "--- a/srt/new.py\n+++ /dev/null\n" in diff
    back = two.json("compare", "two:1", "one:1", "--patch-diff")
    assert ["two:x", "one:x"] == [side["label"] for side in back["attempts"]]
    assert "+THRESHOLD = 0\n" in back["patch_diffs"][0]["diff"]


def test_a_host_that_nobody_pushed_to(two):
    """Its package is not stored: the other host's pristine one stands in, where the version is the same."""
    one, other = two.boxes
    one.launch("x")
    other.launch("y")
    both = two.json("compare", "one:x", "two:y", "--patch-diff")["patch_diffs"][0]
    assert "as installed" in both["note"]
    other.push("a/v1", threshold(7))
    other.launch("z")
    value = two.json("compare", "one:x", "two:z", "--patch-diff")["patch_diffs"][0]
    assert "the pristine package of two stands for its own" in value["note"]
    assert "-THRESHOLD = 0\n+THRESHOLD = 7\n" in value["diff"]
    assert FILES["srt/args.py"] == (one.package / "srt/args.py").read_text()


def test_a_name_without_a_host_where_there_are_several(two):
    """Said how to name it; and what is unknown on one host is told with that host's name."""
    done = two.run("compare", "x", "y")
    assert (2, True) == (done.returncode, "hint" in done.stderr)
    two.boxes[0].launch("t1_eagle")
    two.boxes[1].launch("t2")
    done = two.run("compare", "one:t1_eagel", "two:t2")
    assert 2 == done.returncode
    assert "one | hint: did you mean t1_eagle" in done.stderr


def test_a_bench_that_cannot_be_read_is_a_warning(two):
    """It is left out, which is said, with the host and the file."""
    for box in two.boxes:
        number = box.launch("x")
        box.record(number, "bench/1/bench.json", json.dumps(bench({1: 5})))
    two.boxes[0].record(1, "bench/2/bench.json", "{torn")
    (warning,) = two.json("compare", "one:x", "two:x")["warnings"]
    assert warning.startswith("one: state file ")
    assert "bench/2/bench.json is damaged" in warning


def test_what_a_host_says_cannot_command_the_terminal(two):
    """Controls in what hosts tell are shown, not obeyed, in every part of the text."""
    evil = "\x1b]0;owned\x07"
    for box, speed in zip(two.boxes, (100, 200), strict=True):
        number = box.launch("x", env={"A": f"{evil}{speed}"})
        record = bench({1: speed, 2: speed}, settings={"attention_backend": f"{evil}{speed}"}, warnings=[evil])
        box.record(number, "bench/1/bench.json", json.dumps(record))
        phases = {"state": "ready", "ready_seconds": 1, "phases": [{"name": evil, "seconds": 1.0}]}
        box.record(number, "verdict.json", json.dumps(phases))
    shown = two.run("compare", "one:x", "two:x")
    assert 0 == shown.returncode, shown.stderr
    assert "\\x1b]0;owned" in shown.stdout
    assert "\x1b" not in shown.stdout + shown.stderr
    assert "two:x wins at every concurrency, 2.00x" in shown.stdout
    csv = two.run("compare", "one:x", "two:x", "--csv")
    assert "\x1b" not in csv.stdout + csv.stderr
