"""The four commands over a real sshd, and what goes wrong around them."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from rig import Rig
from sshd_rig import Relay, until

THRESHOLD = ("--", "--speculative-disable-batch-threshold", "5")


@pytest.fixture
def rig(tmp_path):
    with Rig(tmp_path) as rig:
        yield rig


def test_push_launch_logs_rollback(rig):
    """The four commands as the user types them."""
    before = rig.tree()
    push = rig.run("push", "--patch", "v3", "--host", "10.1.230.174")
    assert push.returncode == 0, push.stderr
    assert "release 1 (dynamic_spec/v3)" in push.stdout
    assert rig.tree() != before
    launch = rig.run("launch", "--log-tag", "t5_v3", *THRESHOLD)
    assert launch.returncode == 0, launch.stdout + launch.stderr
    assert "burst: 8 of 8 answered" in launch.stdout
    logs = rig.run("logs")
    assert "The server is fired up and ready to roll!" in logs.stdout
    assert "eagle3_t5_v3.log" in logs.stderr
    rollback = rig.run("rollback")
    assert rollback.returncode == 0, rollback.stderr
    assert rig.tree() == before


def test_a_push_is_one_session_on_the_host(rig):
    """One script, two files and an import check: one exec, by sshd's own log."""
    assert rig.host("push", "--patch", "v1")["status"] == "pushed"
    assert rig.sshd.sessions() == 1
    assert rig.host("push", "--patch", "v1")["status"] == "unchanged"
    assert rig.sshd.sessions() == 2


def test_a_crash_names_its_patched_line(rig):
    """Import check and one request pass; the burst does not, and the line is named."""
    rig.host("push", "--patch", "v1")
    result = rig.host("launch", "--log-tag", "a", *THRESHOLD)
    assert (result["exit_code"], result["status"]) == (6, "crashed")
    crash = result["crash"]
    assert crash["cause"].startswith("RuntimeError: The size of tensor a (")
    assert "must match the size of tensor b" in crash["cause"]
    assert crash["patched"]["patch"] == "dynamic_spec/v1"
    assert crash["patched"]["file"] == "srt/speculative/eagle_worker.py"
    line = (rig.package / crash["patched"]["file"]).read_text().splitlines()[crash["patched"]["line"] - 1]
    assert line.strip() == crash["patched"]["text"]
    shown = rig.run("logs", "--crash")
    assert "patched line: dynamic_spec/v1" in shown.stdout
    status = rig.json("status", "--check")
    assert status["exit_code"] == 6


def test_a_repeated_tag_never_touches_the_earlier_log(rig):
    """Two launches of one tag: two logs, the first as it was, and `logs` can name the older."""
    first = rig.host("launch", "--log-tag", "t", "--", "--enforce-eager")
    assert first["status"] == "crashed"
    assert "unrecognized arguments: --enforce-eager" in first["crash"]["cause"]
    assert first["crash"]["exit_code"] == 2
    kept = Path(first["log"]).read_bytes()
    second = rig.host("launch", "--log-tag", "t")
    assert second["status"] == "ready"
    assert second["log"].endswith("eagle3_t.2.log")
    assert Path(first["log"]).read_bytes() == kept
    assert rig.host("logs", "--log-tag", "t")["attempt"] == 2
    assert rig.host("logs", "--attempt", "1")["log"] == first["log"]


def test_no_wait_returns_and_wait_comes_back(rig):
    """A launch outlives its command; its stdin is /dev/null; `wait` finds it ready."""
    result = rig.host("launch", "--log-tag", "a", "--no-wait")
    assert result["status"] == "loading"
    assert os.readlink(f"/proc/{result['pid']}/fd/0") == "/dev/null"
    assert rig.host("wait")["status"] == "ready"
    assert rig.host("launch", "--log-tag", "b")["exit_code"] == 10
    again = rig.host("launch", "--log-tag", "b", "--replace")
    assert (again["status"], again["attempt"]) == ("ready", 2)
    assert rig.host("stop")["status"] == "stopped"
    assert rig.host("stop")["status"] == "nothing-running"


def test_ctrl_c_detaches_from_a_load(tmp_path):
    """SIGINT during a launch ends the command with 130 and leaves the server loading."""
    with Rig(tmp_path, load_s=6.0) as rig:
        process = rig.start("launch", "--log-tag", "a")
        until(lambda: list((rig.home / "deployctl-logs").glob("*.log")), what="the log")
        until(lambda: rig.host("status")["server"], what="the server")
        process.send_signal(signal.SIGINT)
        _out, err = process.communicate(timeout=20)
        assert process.returncode == 130
        assert "deployctl wait" in err
        assert rig.host("status")["server"]["state"] == "loading"
        assert rig.host("wait")["status"] == "ready"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_push_that_is_killed_leaves_nothing(rig, number):
    """SIGINT and SIGKILL during a patch script: files as before, no lock left."""
    slow = rig.work / "patches" / "slow" / "s1.py"
    slow.parent.mkdir()
    slow.write_text(
        '# /// deployctl\n# targets = ["version.py"]\n# ///\nimport pathlib, sys, time\n'
        "(pathlib.Path(sys.argv[1]) / 'version.py').write_text('__version__ = \"x\"\\n')\n"
        f"pathlib.Path({str(rig.root / 'running')!r}).write_text('')\ntime.sleep(60)\n"
    )
    before = rig.tree()
    process = rig.start("push", "--patch", "slow/s1")
    until((rig.root / "running").exists, what="the script")
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    done = until(lambda: (r := rig.host("push", "--patch", "v3"))["exit_code"] == 0 and r, what="the lock's end")
    assert done["status"] == "pushed"
    assert rig.host("rollback")["status"] == "rolled_back"
    assert rig.tree() == before


def test_two_operators(rig):
    """A second push while one is at work is refused with who and what; a manual hold stops everybody else."""
    slow = rig.work / "patches" / "slow" / "s1.py"
    slow.parent.mkdir()
    slow.write_text(
        '# /// deployctl\n# targets = ["version.py"]\n# ///\nimport pathlib, time\n'
        f"pathlib.Path({str(rig.root / 'running')!r}).write_text('')\n"
        f"while not pathlib.Path({str(rig.root / 'go')!r}).exists(): time.sleep(0.05)\n"
    )
    process = rig.start("push", "--patch", "slow/s1")
    until((rig.root / "running").exists, what="the script")
    rig.environment["DEPLOYCTL_OPERATOR"] = "bob@example.org"
    refused = rig.host("push", "--patch", "v1")
    assert (refused["exit_code"], refused["status"]) == (4, "locked")
    assert "ann@example.org" in refused["error"]["message"]
    assert rig.host("status")["push_in_progress"]["operator"] == "ann@example.org"
    (rig.root / "go").write_text("")
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert rig.run("lock", "acquire", "-m", "benchmark").returncode == 0
    rig.environment["DEPLOYCTL_OPERATOR"] = "ann@example.org"
    held = rig.host("push", "--patch", "v1")
    assert held["exit_code"] == 4
    assert "bob@example.org" in held["error"]["message"]
    assert "benchmark" in held["error"]["message"]
    assert rig.run("lock", "release").returncode == 4
    assert rig.run("lock", "release", "--force").returncode == 0
    assert rig.host("push", "--patch", "v1")["status"] == "pushed"
    assert [entry["status"] for entry in rig.host("audit")["entries"]] == ["pushed", "held", "released", "pushed"]


def test_a_load_survives_a_cut_link(tmp_path):
    """The link is cut during the load: the command attaches again and ends with the verdict."""
    with Rig(tmp_path, load_s=5.0) as rig, Relay(rig.sshd.port) as relay:
        rig.sshd.known_hosts.write_text(
            rig.sshd.known_hosts.read_text() + f"[127.0.0.1]:{relay.port} {rig.sshd.host_key_line}\n"
        )
        rig.write_hosts(relay.port)
        process = rig.start("launch", "--log-tag", "a")
        until(lambda: list((rig.home / "deployctl-logs").glob("*.log")), what="the log")
        relay.cut()
        time.sleep(2.0)  # an outage has a length; the event waited for is the verdict below
        relay.heal()
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert "attaching again" in err
        assert out.startswith("ready")


def test_twelve_names_of_one_machine(tmp_path):
    """MaxStartups drops most of twelve connections at once: all succeed, and the push is done once."""
    names = "".join(f"  n{number}: {{{{address: 127.0.0.1, port: {{port}}}}}}\n" for number in range(12))
    with Rig(tmp_path, more_hosts=names, MaxStartups="2:100:2", MaxSessions="1") as rig:
        chosen = ",".join(f"n{number}" for number in range(12))
        status = rig.json("status", "--host", chosen)
        assert status["exit_code"] == 0, {name: host["error"] for name, host in status["hosts"].items()}
        push = rig.json("push", "--patch", "v3", "--host", chosen)
        assert push["exit_code"] == 0, {name: host["error"] for name, host in push["hosts"].items()}
        assert {host["status"] for host in push["hosts"].values()} == {"pushed"}
        assert sum("alias_of" not in host for host in push["hosts"].values()) == 1
        assert rig.json("history", "--host", "n3")["hosts"]["n3"]["release"] == 1


def test_errors_before_any_connection(rig):
    """Unknown patch, host, profile, tag: exit 2 with the nearest names, and sshd never hears of it."""
    cases = [
        (["push", "--patch", "v33"], "did you mean 'v3'"),
        (["push", "--patch", "v3", "--host", "gpu"], "hosts: 10.1.230.174"),
        (["launch", "--log-tag", "a", "--profile", "eagle"], "did you mean 'eagle3'?"),
        (["launch", "--log-tag", "-a"], "log tag"),
        (["launch", "--log-tag", "a/b"], "log tag"),
        (["play", "nope"], "playbook"),
    ]
    for words, text in cases:
        done = rig.run(*words)
        assert done.returncode == 2, (words, done)
        assert text in done.stderr, (words, done.stderr)
        value = json.loads(rig.run(*words, "--json").stdout)
        assert value["ok"] is False
        assert value["error"]["message"]
    assert rig.sshd.connections() == 0


def test_hosts_that_cannot_be_reached(rig):
    """Refused, unknown name, wrong key, changed host key: exit 3, each with its own words."""
    rig.write_hosts(port=1)
    refused = rig.host("status")
    assert (refused["exit_code"], refused["status"]) == (3, "unreachable")
    assert "refused" in refused["error"]["message"]
    rig.write_hosts()
    rig.sshd.known_hosts.write_text("")
    unknown = rig.host("status")
    assert unknown["error"]["kind"] == "host-key"
    assert f"[127.0.0.1]:{rig.sshd.port}" in unknown["error"]["message"]
    rig.sshd.trust()
    os.unlink(rig.sshd.root / "ak")
    denied = rig.host("push", "--patch", "v3")
    assert denied["exit_code"] == 3
    assert "1 keys offered" in denied["error"]["message"]


def test_python_that_is_not_there(rig):
    """A wrong interpreter path is named, with the key to set."""
    text = (rig.work / "hosts.yaml").read_text().replace(str(rig.python), "~/no-such/python3")
    (rig.work / "hosts.yaml").write_text(text)
    result = rig.host("push", "--patch", "v3")
    assert result["exit_code"] == 3
    assert "no-such/python3" in result["error"]["message"]
    assert "python:" in result["error"]["hint"]
    rig.write_hosts()


def test_noisy_login_scripts(rig):
    """What .bashrc prints is neither protocol nor an error."""
    (rig.home / ".bashrc").write_text("echo noisy-bashrc\nprintf 'no newline'\n")
    assert rig.host("push", "--patch", "v3")["status"] == "pushed"
    assert rig.host("rollback")["status"] == "rolled_back"


def test_iterate_goes_back_where_it_found_the_host(rig):
    """The playbook: a push that crashes at the burst is taken back; a push that fails is not taken back twice."""
    (rig.work / "playbooks").mkdir()
    (rig.work / "playbooks" / "iterate.yaml").write_text(
        "name: iterate\nvars: {patch: v1, log_tag: t}\nsteps:\n  - push: {patch: '{patch}'}\n"
        "  - launch: {log_tag: '{log_tag}', args: ['--speculative-disable-batch-threshold', '5']}\n"
        "on_failure:\n  - logs: {crash: true}\n  - rollback: {}\n"
    )
    good = rig.host("push", "--patch", "v3")
    assert good["release"] == 1
    value = rig.json("play", "iterate")
    assert value["exit_code"] == 6
    assert rig.host("status")["release"] == 1
    broken = rig.work / "patches" / "dynamic_spec" / "v9.py"
    broken.write_text((rig.work / "patches/dynamic_spec/v1.py").read_text() + "\nsys.exit('no')\n")
    value = rig.json("play", "iterate", "--set", "patch=v9")
    assert value["exit_code"] == 1
    assert rig.host("status")["release"] == 1
    unknown = rig.run("play", "iterate", "--set", "pach=v9")
    assert unknown.returncode == 2
    assert "did you mean 'patch'?" in unknown.stderr


def test_rollback_relaunch(rig):
    """--relaunch starts the profile again, on the release before, with a tag of its own."""
    assert rig.host("launch", "--log-tag", "base")["status"] == "ready"
    rig.host("push", "--patch", "v1")
    assert rig.host("launch", "--log-tag", "t", "--replace", *THRESHOLD)["status"] == "crashed"
    value = rig.host("rollback", "--relaunch")
    assert value["status"] == "ready"
    assert value["log_tag"] == "base-r1"
    assert value["release"] == 0
