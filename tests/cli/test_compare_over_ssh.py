"""`deployctl compare` as it is typed, over a real sshd, against the stand-in engine."""

import csv
import io
import json
import os
import pty
import subprocess
import sys

import pytest
from rig import Rig

PROMPTS = "".join(json.dumps({"prompt": f"Write a function number {number} that sorts"}) + "\n" for number in range(5))
QUICK = ("--prompts", "own.jsonl", "--max-tokens", "8", "--requests-per-level", "8")
SLOW_STEPS = ("--standin-step-ms", "30")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A slow base and a patched attempt that is faster, measured with the same load but for one level."""
    with Rig(tmp_path_factory.mktemp("two"), load_s=0.2) as rig:
        (rig.work / "own.jsonl").write_text(PROMPTS)
        measure(rig)
        yield rig


def measure(rig):
    for words in (
        ("launch", "-t", "t0_base", "--no-smoke", "--", *SLOW_STEPS),
        ("bench", "--sweep", "1,2,4", *QUICK),
        ("push", "--patch", "v3"),
        ("launch", "-t", "t1_eagle", "--replace", "--no-smoke", "--", "--speculative-disable-batch-threshold", "5"),
        ("bench", "--sweep", "1,4,8", *QUICK),
    ):
        done = rig.run(*words)
        assert done.returncode == 0, done.stderr


def speeds(rig, attempt, bench=1):
    path = rig.home / ".deployctl" / "attempts" / str(attempt) / "bench" / str(bench) / "bench.json"
    return {level["concurrency"]: level["output_tok_per_s"] for level in json.loads(path.read_text())["levels"]}


def test_two_attempts_side_by_side(two):
    """Table, sentences, bars, differences and phases for people; the same numbers for programs."""
    done = two.run("compare", "t0_base", "10.1.230.174:t1_eagle")
    assert done.returncode == 0, done.stderr
    base, patched = speeds(two, 1), speeds(two, 2)
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line[:1].isdigit()}
    assert ["1", "2", "4", "8"] == list(rows)
    assert [f"{base[1]:.1f}", f"{patched[1]:.1f}*", f"{patched[1] / base[1]:.2f}x"] == rows["1"][1:4]
    assert [f"{base[2]:.1f}", "-", "-"] == rows["2"][1:4]
    assert "-" == rows["8"][1]
    assert "only t0_base at C=2" in done.stdout
    assert "only t1_eagle at C=8" in done.stdout
    assert "t1_eagle wins at every concurrency" in done.stdout
    assert "argument --standin-step-ms" in done.stdout
    assert "argument --speculative-disable-batch-threshold" in done.stdout
    assert "load phase" in done.stdout
    assert "\x1b" not in done.stdout
    assert "####" in done.stdout
    value = two.json("compare", "1", "2")
    assert (True, "compare", 0) == (value["ok"], value["command"], value["exit_code"])
    assert ("ok", 0, [1, 2]) == tuple(value["hosts"]["10.1.230.174"][key] for key in ("status", "exit", "attempts"))
    assert ["t0_base", "t1_eagle"] == [side["label"] for side in value["attempts"]]
    first = value["levels"][0]
    assert (1, "t1_eagle") == (first["concurrency"], first["best"])
    assert patched[1] == first["attempts"]["t1_eagle"]["output_tok_per_s"]
    assert patched[1] / base[1] == pytest.approx(first["attempts"]["t1_eagle"]["ratio"])
    assert {"concurrency": 2, "attempts": ["t0_base"]} in value["measured_only_by"]
    assert value["levels"][1]["attempts"]["t1_eagle"] is None
    changed = {(one["kind"], one["name"]): one["values"] for one in value["differences"]}
    assert {"t0_base": "base", "t1_eagle": "dynamic_spec/v3"} == changed[("run", "patches")]
    assert {"t0_base": "30", "t1_eagle": None} == changed[("argument", "--standin-step-ms")]
    assert {"init", "weights", "ready"} <= {phase["name"] for phase in value["phases"]}
    assert "patch_diffs" not in value
    rows = list(csv.DictReader(io.StringIO(two.run("compare", "1", "2", "--csv").stdout)))
    assert [("1", "1"), ("1", "2"), ("1", "4"), ("2", "1"), ("2", "4"), ("2", "8")] == [
        (row["attempt"], row["concurrency"]) for row in rows
    ]
    assert patched[8] == float(rows[-1]["output_tok_per_s"])
    assert ("dynamic_spec/v3", "") == (rows[-1]["patches"], rows[-1]["ratio"])


def test_the_files_that_they_ran(two):
    """The diff between the releases, by content; nothing where both ran the same."""
    done = two.run("compare", "t0_base", "t1_eagle", "--patch-diff")
    assert "from t0_base to t1_eagle" in done.stdout
    assert "+++ b/srt/speculative/eagle_worker.py" in done.stdout
    assert "+    def without_draft(self, batch):" in done.stdout
    back = two.json("compare", "t1_eagle", "t0_base", "--patch-diff")["patch_diffs"][0]
    assert ("t0_base", "t1_eagle", None) == (back["attempt"], back["against"], back["note"])
    assert "-    def without_draft(self, batch):" in back["diff"]
    assert two.run("launch", "-t", "again", "--replace", "--no-smoke").returncode == 0
    number = two.host("status")["server"]["attempt"]
    same = two.run("compare", "t1_eagle", "again", "--patch-diff")
    assert "both ran the same files" in same.stdout
    assert "without a bench: again" in same.stdout
    assert f"next: deployctl bench --host 10.1.230.174 --attempt {number}" in same.stdout
    assert "load phase" in same.stdout


def test_on_a_terminal_the_bars_are_smooth_and_coloured(two):
    """Block characters and colour where somebody looks; plain with NO_COLOR."""
    for extra, smooth in (({}, True), ({"NO_COLOR": "1"}, False)):
        shown = terminal(two, extra, "compare", "1", "2")
        assert smooth == ("█" in shown)
        assert smooth != ("###" in shown)


def terminal(rig, extra, *words):
    ours, theirs = pty.openpty()
    environment = {**rig.environment, "TERM": "xterm", "LANG": "C.UTF-8", "PYTHONIOENCODING": "utf-8", **extra}
    environment.pop("NO_COLOR", None) if "NO_COLOR" not in extra else None
    child = subprocess.Popen(
        [sys.executable, "-m", "deployctl", *words],
        env=environment,
        cwd=rig.work,
        stdout=theirs,
        stderr=subprocess.PIPE,
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:
            break
        if not chunk:
            break
        shown += chunk
    os.close(ours)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 0, said
    return shown.decode()


def test_what_cannot_be_compared(two):
    """Exit 2 with the nearest names, or what to type; a host that is down is exit 3."""
    for words, message in (
        (("a",), "a comparison needs two attempts"),
        (("a", "b:"), "'b:' names no attempt"),
        (("nowhere:1", "2"), "unknown host 'nowhere'"),
        (("1", "2", "--csv", "--json"), "--csv goes neither"),
        (("t1_eagle", "t1_eagel"), "did you mean t1_eagle"),
        (("1", "t0_base"), "1 and t0_base are one attempt: 1 on 10.1.230.174"),
    ):
        done = two.run("compare", *words)
        assert done.returncode == 2, words
        assert message in done.stderr + done.stdout
    missing = two.host("compare", "1", "77")
    assert (2, "unknown-attempt") == (missing["exit_code"], missing["error"]["kind"])
    two.write_hosts(port=1)
    try:
        assert 3 == two.run("compare", "1", "2").returncode
    finally:
        two.write_hosts()


def test_the_better_one_is_started_with_all_its_arguments(two):
    """What it had beyond its profile comes again, on the release that it ran."""
    (two.work / "keep.yaml").write_text(
        "name: keep\nsteps:\n"
        f"  - launch: {{log_tag: t2, replace: true, smoke: false, args: [{', '.join(SLOW_STEPS)}]}}\n"
        "  - bench: {sweep: '1,4', prompts: own.jsonl, max_tokens: 8, requests_per_level: 8}\n"
        "  - compare: {attempts: [t1_eagle, t2], keep: better, at: 4}\n"
    )
    value = two.json("play", "keep.yaml")
    last = value["hosts"]["10.1.230.174"]["steps"][-1]
    assert value["exit_code"] == 0, last
    assert ("t1_eagle-r1", "ready") == (last["log_tag"], last["status"])
    assert "rollback" not in last
    history = two.host("history")["attempts"]
    assert history[1]["argv"] == history[-1]["argv"]
    assert ["--speculative-disable-batch-threshold", "5"] == history[-1]["argv"][-2:]


def test_nothing_to_decide_by_leaves_everything_as_it_is(two):
    """A level that was not measured in both, an attempt that is not there: exit 2, the server stays."""
    before = two.host("status")["server"]["attempt"]
    for step, message in (
        ("attempts: [t0_base, t1_eagle], keep: better, at: 8", "C=8 was not measured in all of them"),
        ("attempts: [t0_base, t9], keep: better", "there is no attempt t9"),
    ):
        (two.work / "keep.yaml").write_text(f"name: keep\nsteps:\n  - compare: {{{step}}}\n")
        done = two.run("play", "keep.yaml")
        assert 2 == done.returncode
        assert message in done.stderr
    assert before == two.host("status")["server"]["attempt"]
    (two.work / "show.yaml").write_text("name: show\nsteps:\n  - compare: {attempts: [t0_base, t1_eagle]}\n")
    done = two.run("play", "show.yaml")
    assert 0 == done.returncode
    assert "t1_eagle wins at every concurrency" in done.stdout
