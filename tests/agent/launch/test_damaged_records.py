"""One damaged record of an attempt hides neither the other attempts nor a living server, its own included."""

import shutil

import pytest
from launch_host import free_port, until

from deployctl.agent import attempts, processes

SLEEPER = """
    import signal, sys, time
    def drain(*_):
        print("draining", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, drain)
    print("starting", flush=True)
    time.sleep(120)
"""
# What a full disk, a power cut or a hand may leave of a JSON record.
DAMAGES = [b"", b"{", b"[1]", b"{}", b'{"boot_id": 7, "at": "x", "attempt": "x"}', b"\xff\xfe"]


def sleeper(host, tag, **changes):
    return host.launch(tag, argv=host.script(SLEEPER), wait=False, **changes)


def damage(host, number, part, content):
    (host.root / "state dir" / "attempts" / str(number) / f"{part}.json").write_bytes(content)


@pytest.mark.parametrize("part", ["spec", "run", "exit", "orphans", "verdict"])
@pytest.mark.parametrize("content", DAMAGES)
def test_every_command_works_beside_a_damaged_record(host, part, content):
    """history, logs, wait and smoke of the others, status, launch, stop: none ends with an exception or exit 8."""
    sleeper(host, "old")
    damage(host, 1, part, content)
    assert host.launch("new", argv=host.script(SLEEPER), wait=False, port=free_port())["exit"] == 0
    told = " ".join(event["text"] for event in host.wire.named("warning"))
    well_formed = part in ("verdict", "spec", "orphans") and content.startswith(b"{") and content != b"{"
    assert well_formed or f"attempts/1/{part}.json is damaged" in told
    assert "new" in [entry["log_tag"] for entry in host.ask("history")["attempts"]]
    assert host.ask("logs", list=True)["exit"] == 0
    assert host.ask("wait", attempt=2, wait=False)["status"] == "loading"
    status = host.ask("status")
    assert status["server"]["attempt"] == 2
    pids = {process.pid for process, _ in host.marked()}
    result = host.ask("stop")
    assert (result["status"], result["exit"]) == ("stopped", 0), result["error"]
    assert host.marked() == []
    assert pids >= {entry["pid"] for attempt in result["stopped"] for entry in attempt["ended"]}
    assert {1, 2} == {attempt["attempt"] for attempt in result["stopped"]}
    assert host.ask("stop")["status"] == "nothing-running"


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("part", ["spec", "run", None])
def test_a_server_whose_record_is_gone_is_stopped_in_order(host, part, named):
    """By its mark: SIGTERM and its grace first, as for any; also where the whole folder was removed."""
    sleeper(host, "a")
    log = host.log()
    until_text(log, "starting")
    if part is None:
        shutil.rmtree(host.root / "state dir" / "attempts" / "1")
    else:
        damage(host, 1, part, b"")
    assert [process["attempt"] for process in host.ask("status")["orphans"]] == ([] if part == "run" else [1])
    result = host.ask("stop", **({"attempt": 1} if named else {}))
    assert (result["status"], result["exit"], result["attempt"]) == ("stopped", 0, 1), result["error"]
    assert result["stopped"][0]["orphans"] == 0
    assert "draining" in log.read_text()
    assert host.marked() == []


def until_text(path, text):
    until(lambda: text in path.read_text(), text)


@pytest.mark.parametrize("part", ["spec", "run", None])
def test_a_clean_up_keeps_a_server_whose_record_was_damaged(host, part):
    """It serves: only --all or stop end it."""
    sleeper(host, "a")
    pid, start = host.server()
    if part is None:
        shutil.rmtree(host.root / "state dir" / "attempts" / "1")
    else:
        damage(host, 1, part, b"")
    result = host.ask("clean")
    assert (result["status"], result["ended"]) == ("clean", []), result["error"]
    assert [entry["attempt"] for entry in result["kept"]] == [1]
    assert processes.alive(pid, start)
    assert host.ask("clean", all=True)["status"] == "clean"
    assert not processes.alive(pid, start)


def test_the_newest_attempt_is_not_silently_another(host):
    """Who means the newest, or names it, is told that it cannot be read; the hint moves that record away and no more."""
    sleeper(host, "a")
    host.ask("stop")
    sleeper(host, "b")
    damage(host, 2, "spec", b"")
    for args in ({}, {"attempt": 2}):
        for operation in ("wait", "logs"):
            result = host.ask(operation, **args)
            assert (result["exit"], result["error"]["kind"]) == (8, "record-damaged")
            assert "attempt 2" in result["error"]["message"]
            assert "deployctl stop" in result["error"]["hint"]
            assert "/attempts/2.damaged'" in result["error"]["hint"]
    assert host.ask("wait", attempt=1)["status"] == "stopped"


def test_a_server_whose_run_record_is_damaged_is_followed(host):
    """Its process is known by its mark: it becomes ready, and its crash is named."""
    host.launch("a", wait=False, load_s=0.3)
    pid, _ = host.server()
    keeper = host.attempt()["run"]["keeper_pid"]
    damage(host, 1, "run", b"")
    attempt = host.attempt()
    assert attempts.is_alive(attempt)
    assert (attempt["run"]["pid"], attempt["run"]["keeper_pid"]) == (pid, keeper)
    result = host.ask("wait")
    assert (result["status"], result["pid"]) == ("ready", pid), result["error"]
    assert host.ask("status")["server"]["pid"] == pid
