"""The playbook step compare with keep: each host decides for itself, and what goes wrong leaves a server that is known."""

import json
import socket

import pytest
from made_attempts import bench
from support import threshold
from two_hosts import Two

SERVER = """
import http.server, os, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *words):
        pass

if os.path.exists("{broken}"):
    raise SystemExit("broken since")
print(sys.argv, os.environ.get("MODE"), flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def two(tmp_path):
    server = tmp_path / "server.py"
    server.write_text(SERVER.format(broken=tmp_path / "broken"))
    two = Two(tmp_path, {"p-one": (server, free_port()), "p-two": (server, free_port())})
    (tmp_path / "keep.yaml").write_text("name: keep\nsteps:\n  - compare: {attempts: [base, patched], keep: better}\n")
    yield two
    two.end()


def prepare(two, *, speeds):
    """On each host a base and a patched attempt, the patched one running; `speeds` for each host (base, patched)."""
    for box, name, (base, patched) in zip(two.boxes, ("one", "two"), speeds, strict=True):
        launch = ("launch", "--host", name, "--profile", f"p-{name}", "--replace")
        done = two.run(*launch, "-t", "base", "--", "--level", "7")
        assert done.returncode == 0, done.stderr
        box.record(1, "bench/1/bench.json", json.dumps(bench({8: base, 64: base})))
        box.push("a/v1", threshold(5))
        done = two.run(*launch, "-t", "patched")
        assert done.returncode == 0, done.stderr
        box.record(2, "bench/1/bench.json", json.dumps(bench({8: patched, 64: patched})))


def serving(two, name):
    status = two.json("status", "--host", name)["hosts"][name]
    return status["server"] and status["server"]["log_tag"], status["release"]


def played(two, *words):
    value = two.json("play", str(two.root / "keep.yaml"), "--host", "one,two", *words)
    return value["exit_code"], {name: host["steps"][-1] for name, host in value["hosts"].items()}


def test_every_host_decides_for_itself(two):
    """One goes back to its base with the arguments it had, the other stays as it is."""
    prepare(two, speeds=[(900, 354), (354, 900)])
    code, hosts = played(two)
    assert 0 == code, hosts
    assert ("ready", "base-r1", 3) == tuple(hosts["one"][key] for key in ("status", "log_tag", "attempt"))
    assert ("rolled_back", 0) == (hosts["one"]["rollback"]["status"], hosts["one"]["rollback"]["release"])
    assert ("kept", "patched", True) == (
        hosts["two"]["status"],
        hosts["two"]["kept"]["label"],
        hosts["two"]["kept"]["running"],
    )
    assert [("base-r1", 0), ("patched", 1)] == [serving(two, "one"), serving(two, "two")]
    history = two.json("history", "--host", "one")["hosts"]["one"]["attempts"]
    assert history[0]["argv"] == history[-1]["argv"]
    assert ["--level", "7"] == history[-1]["argv"][-2:]
    again, hosts = played(two)
    assert (0, "patched") == (again, hosts["two"]["kept"]["label"])


def test_even_ones_are_left_alone(two):
    """Two per cent are no reason to load for nine minutes."""
    prepare(two, speeds=[(102, 100), (100, 102)])
    code, hosts = played(two)
    assert (0, "kept", "kept") == (code, hosts["one"]["status"], hosts["two"]["status"])
    assert [("patched", 1), ("patched", 1)] == [serving(two, "one"), serving(two, "two")]
    assert "base and patched are even at C=64" == hosts["one"]["kept"]["reason"]
    done = two.run("play", str(two.root / "keep.yaml"), "--host", "one,two")
    assert "base and patched are even at C=64: patched stays up" in done.stdout


def test_a_tree_that_somebody_edited_keeps_its_server(two):
    """No rollback over hand-made edits: exit 9, and what ran goes on."""
    prepare(two, speeds=[(900, 354), (354, 900)])
    (two.boxes[0].package / "srt" / "args.py").write_text("BY = 'hand'\n")
    code, hosts = played(two)
    assert (9, "drift", "drift") == (code, hosts["one"]["status"], hosts["one"]["error"]["kind"])
    done = two.run("play", str(two.root / "keep.yaml"), "--host", "one")
    assert 9 == done.returncode
    assert "base wins at every concurrency, 2.54x at C=8" in done.stdout
    assert "srt/args.py" in done.stderr
    assert "hint: deployctl rollback --host one --to base --dry-run shows the edits" in done.stderr
    assert "serves again" not in done.stdout
    assert [("patched", 1), ("patched", 1)] == [serving(two, "one"), serving(two, "two")]


def test_a_server_that_does_not_come_up_again(two):
    """Exit 6 with its crash; the playbook ends there, and the other host has its server."""
    prepare(two, speeds=[(900, 354), (354, 900)])
    (two.root / "broken").write_text("")
    code, hosts = played(two)
    assert (6, "crashed") == (code, hosts["one"]["status"])
    assert "broken since" in json.dumps(hosts["one"]["crash"])
    assert "kept" == hosts["two"]["status"]
    assert [(None, 0), ("patched", 1)] == [serving(two, "one"), serving(two, "two")]


def test_a_profile_that_has_changed_is_said(two):
    """It is started as hosts.yaml has it now, and what is no longer as it was is a warning."""
    prepare(two, speeds=[(900, 354), (354, 900)])
    hosts = two.root / "hosts.yaml"
    hosts.write_text(
        hosts.read_text()
        .replace("    smoke: false\n", "    smoke: false\n    env: {MODE: x}\n")
        .replace("args: {port", "args: {quick: true, port")
    )
    done = two.run("play", str(two.root / "keep.yaml"), "--host", "one,two")
    assert 0 == done.returncode, done.stderr
    assert "not as attempt 1 ran: hosts.yaml has changed: now without --level 7, with --quick" in done.stderr
    assert "the environment has another MODE" in done.stderr
    assert "base is 2.54x patched at C=64: base serves again, as base-r1" in done.stdout


def test_what_a_step_compare_may_hold(two):
    """Checked before the first step: two names without hosts, `better` or nothing, `at` only to decide."""
    for step, message in (
        ("{attempts: [a]}", "a comparison needs two attempts"),
        ("{attempts: [a, 'one:b']}", "'one:b' names no attempt"),
        ("{attempts: [a, b], keep: fastest}", "keep: 'fastest'"),
        ("{attempts: [a, b], at: 8}", "`at` decides which one is kept"),
        ("{keep: better}", "compare needs `attempts`"),
    ):
        (two.root / "bad.yaml").write_text(f"name: bad\nsteps:\n  - compare: {step}\n")
        done = two.run("play", str(two.root / "bad.yaml"), "--host", "one", "--dry-run")
        assert 2 == done.returncode
        assert message in done.stderr
        assert "bad.yaml:3" in done.stderr


def test_only_hosts_that_a_playbook_changed_are_started_again(two):
    """`rollback: {relaunch: true}` on failure: where nothing was pushed nothing is taken back, and nothing started."""
    prepare(two, speeds=[(1, 1), (1, 1)])
    (two.root / "patches" / "b").mkdir(parents=True)
    (two.root / "patches" / "b" / "v1.py").write_text(threshold(6).replace("THRESHOLD = 0", "THRESHOLD = 5"))
    (two.root / "fail.yaml").write_text(
        "name: fail\nsteps:\n  - push: {patch: b/v1, host: one}\n  - run: {argv: [no-such-program]}\n"
        "on_failure:\n  - stop: {}\n  - rollback: {relaunch: true}\n"
    )
    value = two.json("play", str(two.root / "fail.yaml"), "--host", "one,two")
    assert 1 == value["exit_code"]
    last = {name: host["steps"][-1] for name, host in value["hosts"].items()}
    assert ("ready", "patched-r1", "rolled_back") == (
        last["one"]["status"],
        last["one"]["log_tag"],
        last["one"]["rollback"]["status"],
    )
    assert "unchanged" == last["two"]["status"]
    assert [("patched-r1", 1), (None, 1)] == [serving(two, "one"), serving(two, "two")]
