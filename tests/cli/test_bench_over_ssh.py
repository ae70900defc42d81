"""`deployctl bench` as it is typed, over a real sshd, against the stand-in engine."""

import json
import os
import pty
import select
import signal
import subprocess
import sys

import pytest
from rig import Rig
from sshd_rig import Relay, until

PROMPTS = "".join(json.dumps({"prompt": f"Write a function number {number} that sorts"}) + "\n" for number in range(5))
QUICK = ("--prompts", "own.jsonl", "--max-tokens", "8", "--requests-per-level", "8")
SLOW = ("--prompts", "own.jsonl", "--max-tokens", "40", "--requests-per-level", "8", "--sweep", "8,4,2,1")
# 256 tokens an answer, as is usual, of an engine that takes a millisecond for a step.
FAST = ("--", "--standin-step-ms", "1")


@pytest.fixture
def rig(tmp_path):
    with Rig(tmp_path) as rig:
        (rig.work / "own.jsonl").write_text(PROMPTS)
        yield rig


def record(rig, attempt=1, bench=1):
    path = rig.home / ".deployctl" / "attempts" / str(attempt) / "bench" / str(bench) / "bench.json"
    return json.loads(path.read_text()) if path.exists() else {"levels": []}


def concurrencies(value):
    return [level["concurrency"] for level in value["levels"]]


def server_of(rig):
    return rig.host("status")["server"]["pid"]


def test_levels_are_told_shown_and_kept(rig):
    """A line for each level on stderr, a table on stdout, the record on the host, and one object for programs."""
    assert rig.run("launch", "-t", "a").returncode == 0
    done = rig.run("bench", "--sweep", "1,2,8", *QUICK)
    assert done.returncode == 0, done.stderr
    assert [f"C={level}: " for level in (1, 2, 8)] == [
        line[: len(f"C={line[2]}: ")] for line in done.stderr.splitlines() if line.startswith("C=")
    ]
    rows = [line.split() for line in done.stdout.splitlines() if "8/8" in line]
    assert ["1", "2", "8"] == [row[0] for row in rows]
    levels = record(rig)["levels"]
    assert [f"{level['output_tok_per_s']:.1f}" for level in levels] == [row[1] for row in rows]
    assert "TTFT p50" in done.stdout
    assert "prompts own.jsonl (5), 8 tokens each, seed 1" in done.stdout

    host = rig.host("bench", "--sweep", "2", *QUICK, "--log-tag", "a")
    assert ("complete", 0, None) == (host["status"], host["exit_code"], host["error"])
    assert record(rig, bench=2) == host["bench"]
    assert "bench" in rig.run("audit").stdout

    # More at once than the server runs is measured, and said.
    crowded = rig.run("bench", "--sweep", "65", "--prompts", "own.jsonl", "--max-tokens", "4")
    assert crowded.returncode == 0, crowded.stderr
    assert "at most 64 requests at once" in crowded.stderr


def test_a_server_killed_in_the_middle_of_a_sweep(rig):
    """Levels so far are kept and shown, the crash is named, exit 6."""
    assert rig.run("launch", "-t", "a", "--", "--standin-step-ms", "10").returncode == 0
    pid = server_of(rig)
    bench = rig.start("bench", *SLOW)
    until(lambda: record(rig)["levels"], what="the first level")
    os.kill(pid, signal.SIGKILL)
    out, err = bench.communicate(timeout=60)
    assert 6 == bench.returncode, err
    assert "CRASHED: ended by SIGKILL" in err
    assert "ended by SIGKILL" in out
    assert "8/8" in out
    assert "not measured: " in out
    assert "deployctl logs --crash" in err
    kept = record(rig)
    assert ("crashed", True) == (kept["state"], 1 <= len(kept["levels"]) < 4)


@pytest.mark.parametrize("outage", ["connection killed", "link down for a while"])
def test_a_link_cut_in_the_middle_of_a_sweep(rig, outage):
    """The bench goes on with the levels that are missing; those that were measured are not measured again."""
    assert rig.run("launch", "-t", "a", "--", "--standin-step-ms", "10").returncode == 0
    with Relay(rig.sshd.port) as relay:
        rig.sshd.known_hosts.write_text(
            rig.sshd.known_hosts.read_text() + f"[127.0.0.1]:{relay.port} {rig.sshd.host_key_line}\n"
        )
        rig.write_hosts(relay.port)
        bench = rig.start("bench", *SLOW)
        first = until(lambda: record(rig)["levels"], what="the first level")[0]
        if outage == "connection killed":
            rig.sshd.drop_connections()
        else:
            relay.cut()
            until(lambda: record(rig)["state"] == "cancelled", what="the agent's end")
            relay.heal()
        out, err = bench.communicate(timeout=90)
    assert 0 == bench.returncode, err
    assert "trying again; the levels so far are kept" in err
    kept = record(rig)
    assert ("complete", [8, 4, 2, 1]) == (kept["state"], concurrencies(kept))
    assert first == kept["levels"][0]
    assert 4 == out.count("8/8")
    assert not (rig.home / ".deployctl" / "attempts" / "1" / "bench" / "2").exists()


def test_ctrl_c_cancels_a_bench(rig):
    """Exit 130; the generator is ended, the server is not, the levels so far are shown and kept."""
    assert rig.run("launch", "-t", "a", "--", "--standin-step-ms", "10").returncode == 0
    bench = rig.start("bench", *SLOW)
    until(lambda: record(rig)["levels"], what="the first level")
    bench.send_signal(signal.SIGINT)
    out, err = bench.communicate(timeout=60)
    assert 130 == bench.returncode, err
    assert "8/8" in out
    assert "cancelled: " in err
    assert "cancelled" == record(rig)["state"]
    assert "ready" == rig.host("status")["server"]["state"]
    assert rig.run("bench", "--sweep", "1", *QUICK).returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--sweep", "1,x"), "'x' is not a number from 1 to 4096"),
        (("--sweep", "4,4"), "4 stands there twice"),
        (("--sweep", ""), "is not a number"),
        (("--prompts", "codin"), "did you mean 'coding'?"),
        (("--prompts", "broken.jsonl"), "broken.jsonl:2: is no JSON"),
        (("--prompts", "ends.jsonl"), "ends.jsonl:1: the last turn should be the user's"),
        (("--max-tokens", "2"), "--max-tokens is 2: 4 to 100000"),
        (("--sweep", "8", "--requests-per-level", "4"), "4 requests are never 8 at once"),
        (("--attempt", "1", "--log-tag", "a"), "name the server twice"),
        (("--timeout", "soon"), "should be a duration"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_connecting(tmp_path, words, said):
    """Exit 2 with the place in the file or the option, and no host is asked."""
    (tmp_path / "hosts.yaml").write_text("hosts: {h: {address: 192.0.2.1}}\n")
    (tmp_path / "broken.jsonl").write_text(PROMPTS.splitlines()[0] + "\n{\n")
    turns = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
    (tmp_path / "ends.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "deployctl", "bench", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert 2 == done.returncode, done.stderr
    assert said in done.stderr


def test_launch_with_a_bench_and_a_playbook_of_both(rig):
    """`launch --sweep` measures what came up; the steps `launch` with `bench`, and `bench`, do the same."""
    launched = rig.host("launch", "-t", "a", "--sweep", "1,4", "--prompts", "own.jsonl", "--no-smoke", *FAST)
    assert ("ready", 0, [1, 4]) == (launched["status"], launched["exit_code"], concurrencies(launched["bench"]))
    assert 16 == launched["bench"]["levels"][0]["sent"]
    refused = rig.run("launch", "-t", "b", "--bench", "--no-wait")
    assert (2, True) == (refused.returncode, "--no-wait" in refused.stderr)
    (rig.work / "measure.yaml").write_text(
        "steps:\n"
        "  - launch: {log_tag: b, replace: true, smoke: false, bench: '16', prompts: own.jsonl}\n"
        "  - bench: {sweep: '2,1', prompts: own.jsonl, max_tokens: 8, requests_per_level: 4, seed: 7, timeout: 1m}\n"
    )
    done = rig.run("play", "measure.yaml")
    assert done.returncode == 0, done.stderr
    assert [16] == concurrencies(record(rig, 2, 1))
    second = record(rig, 2, 2)
    assert ([2, 1], 7, 4) == (concurrencies(second), second["load"]["seed"], second["load"]["requests_per_level"])
    (rig.work / "wrong.yaml").write_text("steps:\n  - bench: {sweep: '2,x'}\n")
    wrong = rig.run("play", "wrong.yaml")
    assert (2, True) == (wrong.returncode, "wrong.yaml:2" in wrong.stderr)


def test_a_launch_whose_bench_the_server_does_not_survive(rig):
    """The launch was good, the server is gone: crashed, exit 6, with what was measured."""
    done = rig.host(
        "launch", "-t", "a", "--no-smoke", "--sweep", "4,16", "--prompts", "own.jsonl", *FAST, "--standin-mode", "burst"
    )
    assert ("crashed", 6, [4]) == (done["status"], done["exit_code"], concurrencies(done["bench"]))
    assert "illegal memory access" in done["crash"]["cause"]


def test_a_bar_on_a_terminal(rig):
    """While a level runs: its concurrency, how many are through, and which level it is."""
    assert rig.run("launch", "-t", "a", "--", "--standin-step-ms", "10").returncode == 0
    near, far = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "deployctl", "bench", *SLOW],
        env={**rig.environment, "COLUMNS": "100", "TERM": "xterm"},
        cwd=rig.work,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=far,
    )
    os.close(far)
    shown = b""
    while True:
        if not select.select([near], [], [], 60)[0]:
            break
        try:
            chunk = os.read(near, 65536)
        except OSError:
            break
        if not chunk:
            break
        shown += chunk
    process.communicate(timeout=60)
    os.close(near)
    assert 0 == process.returncode, shown
    assert b"level 4 of 4" in shown
    assert b"/8" in shown
