"""Stop: graceful, then forced, of everything that is the attempt's and of nothing else."""

import os
import signal
import subprocess
import sys

from launch_host import until

from deployctl.agent import attempts, processes, ranks, watcher
from deployctl.agent import stop as stop_module


def stopped(host, **args):
    result = host.ask("stop", **args)
    assert (result["status"], result["exit"]) == ("stopped", 0), result["error"]
    assert host.marked() == []
    return result


def test_stop_ends_a_server_in_order(host):
    """SIGTERM lets it drain; nothing of it lives; the state says stopped and by whom."""
    host.launch("a")
    result = stopped(host)
    entry = result["stopped"][0]
    assert (entry["attempt"], entry["log_tag"], entry["orphans"], entry["note"]) == (1, "a", 0, "")
    assert len(entry["ended"]) >= 2
    assert "SIGTERM received" in host.log().read_text()
    verdict = host.attempt()["verdict"]
    assert (verdict["state"], verdict["by"]) == ("stopped", "ann@example.org")
    assert verdict["ready_seconds"]
    assert host.ask("stop") == {"status": "nothing-running", "stopped": [], "exit": 0, "error": None}


def test_stopping_what_has_ended_is_no_error(host):
    """By number too."""
    host.launch("a", argv=host.script("pass"), engine="openai")
    assert host.ask("stop", attempt=1)["status"] == "nothing-running"
    assert host.attempt()["verdict"]["state"] == "crashed"
    assert host.ask("stop", attempt=99)["exit"] == 2


def test_a_server_that_ignores_sigterm_is_killed_after_its_grace(host):
    """And that is told."""
    host.host["limits"]["term_grace_s"] = 0.5
    host.launch("a", mode="stubborn", smoke=False)
    stopped(host)
    assert any("SIGKILL" in (event.get("text") or "") for event in host.wire.named("step"))
    assert host.attempt()["exit"]["signal"] == "SIGKILL"


def test_orphans_of_a_dead_launcher_are_named_and_ended_and_nothing_else(host):
    """Schedulers leave the launcher's session and are reparented; they hold the cards."""
    bystander = subprocess.Popen(
        ["sglang::scheduler_TP0", "-c", "input()"], executable=sys.executable, stdin=subprocess.PIPE
    )
    try:
        host.launch("a", mode="orphan", smoke=False)
        pid, _ = host.server()
        os.kill(pid, signal.SIGKILL)
        until(lambda: host.attempt()["exit"])
        status = host.ask("status")
        assert status["server"] is None
        assert [(orphan["attempt"], orphan["note"]) for orphan in status["orphans"]] == [(1, "launcher dead")]
        entry = stopped(host)["stopped"][0]
        assert (entry["orphans"], entry["note"]) == (1, "launcher dead, 1 orphan")
        assert "launcher dead, 1 orphan" in [event.get("text") for event in host.wire.named("step")]
        assert host.attempt()["verdict"]["state"] == "crashed"
        assert bystander.poll() is None
    finally:
        bystander.stdin.close()
        bystander.wait(10)


def test_children_without_the_mark_are_ended_too(host):
    """One cleared its environment, one lost its parent as well: the server's descendants and session are known."""
    script = """
        import os, subprocess, sys, time
        sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
        one = subprocess.Popen(sleep, env={}, start_new_session=True)
        start = "import subprocess,sys; print(subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL).pid)"
        two = subprocess.check_output([sys.executable, "-c", start, *sleep], env={}).decode().strip()
        print(one.pid, two, flush=True)
        time.sleep(300)
    """
    host.launch("a", argv=host.script(script), wait=False)
    pids = [int(word) for word in until(lambda: host.log().read_text().split())]
    starts = {pid: processes.start_time(pid) for pid in pids}
    assert all(starts.values())
    entry = stopped(host)["stopped"][0]
    assert {item["pid"] for item in entry["ended"]} == {host.server()[0], *pids}
    assert not any(processes.alive(pid, start) for pid, start in starts.items())


def test_orphans_without_the_mark_are_known_by_their_descent(host):
    """A child that cleared its environment and left the session outlives a killed launcher: seen, named and ended."""
    script = """
        import subprocess, sys, time
        sleep = "import subprocess,sys,time; subprocess.Popen([sys.executable,'-c','import time; time.sleep(300)'])"
        one = subprocess.Popen([sys.executable, "-c", sleep + "; time.sleep(300)"], env={}, start_new_session=True)
        print(one.pid, flush=True)
        time.sleep(300)
    """
    host.launch("a", argv=host.script(script), wait=False)
    orphan = int(until(lambda: host.log().read_text().strip()))
    until(lambda: processes.descendants(orphan))
    family = [orphan, *(process.pid for process in processes.descendants(orphan))]
    os.kill(host.server()[0], signal.SIGKILL)
    until(lambda: host.attempt()["exit"])
    assert sorted(family) == sorted(entry["pid"] for entry in host.ask("status")["orphans"])
    entry = stopped(host)["stopped"][0]
    assert sorted(family) == sorted(item["pid"] for item in entry["ended"])
    assert entry["note"] == "launcher dead, 2 orphans"
    assert not any(processes.start_time(pid) for pid in family)
    assert host.ask("stop")["status"] == "nothing-running"


def test_what_was_left_behind_is_not_somebody_elses_by_number(host):
    """The record's pids count only with their start times, on the same boot."""
    host.launch("a", argv=host.script("pass"), wait=False)
    until(lambda: host.attempt()["exit"])
    mine = [[os.getpid(), processes.start_time(os.getpid()) + 1]]
    host.state.write_json({"processes": mine}, "attempts", 1, "orphans.json")
    assert [] == attempts.left_behind(host.attempt())
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        born = processes.start_time(child.pid)
        host.state.write_json({"processes": [[child.pid, born]]}, "attempts", 1, "orphans.json")
        assert [child.pid] == [process.pid for process in attempts.left_behind(host.attempt())]
        run = host.attempt()["run"]
        host.state.write_json(dict(run, boot_id="another"), "attempts", 1, "run.json")
        assert [] == attempts.left_behind(host.attempt())
    finally:
        child.stdin.close()
        child.wait(10)


def test_a_watcher_sees_a_stop_and_no_crash(host):
    """Whoever follows the load is told who stopped it."""
    behind = host.launch_behind("a", load_s=10)
    behind.event("health")
    host.ask("stop", operator="bob@example.org")
    result = behind.finish()
    assert (result["status"], result["exit"], result["crash"]) == ("stopped", 1, None)
    assert result["error"]["message"] == "attempt 1 (a) was stopped by bob@example.org"
    again = host.ask("wait")
    assert (again["status"], again["exit"]) == ("stopped", 1)
    assert not [event for event in behind.wire.events if event["event"] == "crash"]


def test_a_drain_that_outlasts_its_ranks_is_not_called_stopped_early(host, monkeypatch):
    """The ranks go first; as long as the server lives, whoever watches waits for its end."""
    monkeypatch.setattr(watcher, "TERMINAL_GRACE_S", 0.1)
    script = """
        import signal, subprocess, sys, time
        rank = subprocess.Popen(["sglang::scheduler", "-c", "input()"], executable=sys.executable, stdin=subprocess.PIPE)
        def drain(*_):
            rank.kill()
            rank.wait()
            print("drained", flush=True)
            time.sleep(1.0)
            sys.exit(0)
        signal.signal(signal.SIGTERM, drain)
        print("up", flush=True)
        time.sleep(100)
    """
    host.launch("a", argv=host.script(script), wait=False)
    until(lambda: b"sglang::scheduler" in [ranks.title_of(pid) for pid in ranks.children(host.server()[0])])
    watched = watcher.Watcher(host.context("wait"), host.attempt())
    watched.tick(look_at_ranks=True)
    attempts.mark_stopping(host.state, host.attempt(), "ann")
    os.kill(host.server()[0], signal.SIGTERM)
    until(lambda: watched.tick(look_at_ranks=True) or watched.doomed, "the rank's end")
    until(lambda: watched.tick() or watched.ended)
    assert watched.exit["status"] == 0
    assert attempts.state_of(host.attempt()) == "stopped"


def test_cleaning_everything_is_a_stop_for_whoever_watches(host):
    """`clean --all` ends a healthy server of ours on purpose."""
    behind = host.launch_behind("a", load_s=10)
    behind.event("health")
    assert host.ask("clean", all=True)["status"] == "clean"
    assert behind.finish()["status"] == "stopped"


def test_stop_never_says_stopped_while_something_lives(host, monkeypatch):
    """Survivors are named; the attempt is not stopped, and the others are stopped all the same."""
    host.launch("a", load_s=0.2)
    host.port += 1
    host.launch("b", load_s=0.2, argv=host.script("import time\ntime.sleep(100)"), wait=False, clean="none")
    end, stuck = processes.end, host.server(1)[0]

    def end_all_but_one(targets, *words):
        """As if one were in the driver, in state D."""
        kept = [process for process in targets if process.pid == stuck]
        return end([process for process in targets if process.pid != stuck], *words) + kept

    monkeypatch.setattr(stop_module.processes, "end", end_all_but_one)
    result = host.ask("stop")
    assert (result["status"], result["exit"], result["error"]["kind"]) == ("failed", 1, "not-stopped")
    assert f"1 process left alive: {stuck} (" in result["error"]["message"]
    assert [process["pid"] for process in result["survivors"]] == [stuck]
    assert [entry["attempt"] for entry in result["stopped"]] == [2]
    # Its scheduler is gone: the launcher may follow any moment, and then counts as stopped; never as crashed.
    assert attempts.state_of(host.attempt(1)) in ("ready", "stopped")
    monkeypatch.undo()
    stopped(host)
    assert host.attempt(1)["verdict"]["state"] == "stopped"


def test_several_servers_are_stopped_together(host):
    """Every attempt of ours that lives, without naming it."""
    for number in range(2):
        host.port += number
        host.launch(f"t{number}", argv=host.script("import time\ntime.sleep(100)"), wait=False, clean="none")
    result = stopped(host)
    assert [entry["attempt"] for entry in result["stopped"]] == [1, 2]
