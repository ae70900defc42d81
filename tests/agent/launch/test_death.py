"""A server that is gone is told from one that is slow, and its end is named at once."""

import os
import signal
import time

import pytest
from launch_host import until

from deployctl.agent import attempts, crash, health, processes, ranks, watch, watcher

# An engine that takes its time: it serves nothing, and ends as the test tells it through its log.
SLEEPER = "import time\nprint('starting', flush=True)\ntime.sleep(120)\n"


@pytest.fixture(autouse=True)
def short_graces(monkeypatch):
    monkeypatch.setattr(watcher, "TERMINAL_GRACE_S", 0.5)


def test_wrong_arguments_are_a_crash_with_their_reason(host):
    """An exit at once is not waited for until the timeout."""
    result = host.launch("a", "--enforce-eager")
    assert (result["status"], result["exit"]) == ("crashed", 6)
    assert "unrecognized arguments: --enforce-eager" in result["crash"]["cause"]
    assert (result["crash"]["exit_code"], result["crash"]["signal"]) == (2, None)
    assert result["crash"]["log"] == result["log"]
    assert host.wire.named("crash")[0]["cause"] == result["crash"]["cause"]
    # It ran the package as it came: there is nothing to roll back.
    assert result["error"]["hint"] == "deployctl logs --crash"


@pytest.mark.parametrize(("release", "offer"), [(None, ""), (0, ""), (3, "; deployctl rollback")])
def test_a_rollback_is_offered_where_there_is_something_to_take_back(release, offer):
    """An attempt on the base, or before the first push, ran no patches."""
    assert offer == watch._or_back({"release": release}, "; ")


def test_a_death_during_the_load_is_named_from_the_childs_traceback(host):
    """The first cause, its frames, the signal of the parent; the verdict follows the exit within a second."""
    result = host.launch("a", "--standin-die-at", "0.3", mode="die", load_s=1)
    assert result["status"] == "crashed"
    assert "CUDA out of memory" in result["crash"]["cause"]
    assert result["crash"]["frames"]
    attempt = host.attempt()
    assert attempt["verdict"]["crash"] == result["crash"]
    assert attempt["verdict"]["at"] - attempt["exit"]["at"] < 1.0


@pytest.mark.parametrize(
    ("ending", "field", "value"),
    [
        ("raise SystemExit(7)", "exit_code", 7),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "signal", "SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 2)", "signal", f"signal {signal.SIGRTMIN + 2}"),
        ("pass", "exit_code", 0),
    ],
)
def test_every_way_to_end_is_recorded(host, ending, field, value):
    """Status or signal, also of signals without a name, and a success is no success for a server."""
    script = "import os, resource, signal\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n" + ending
    result = host.launch("a", argv=host.script(script))
    assert (result["status"], result["crash"][field]) == ("crashed", value)


def test_a_last_line_without_its_end_is_read(host):
    """What a dying process prints last often has no newline."""
    result = host.launch("a", argv=host.script("import sys\nsys.stderr.write('fatal: no such card')\nsys.exit(1)"))
    assert "fatal: no such card" in result["crash"]["cause"]


def test_a_terminal_line_counts_when_the_server_does_not_survive_it_for_long(host):
    """Evidence from the log alone: named after the grace, with the process still there and said to be."""
    script = SLEEPER.replace("starting", "Rank 0 scheduler is dead. Please check if there are relevant logs.")
    result = host.launch("a", argv=host.script(script))
    assert result["status"] == "crashed"
    assert "scheduler is dead" in result["crash"]["cause"]
    assert result["crash"]["exit_code"] is None
    assert result["error"]["hint"].startswith("what is left of it still runs: deployctl stop")


def test_a_rank_that_is_gone_while_the_launcher_hangs(host, monkeypatch):
    """0.5.9 waits rank by rank and hangs for ever when a higher rank dies without a word."""
    monkeypatch.setattr(ranks, "INTERVAL_S", 0.05)
    script = """
        import subprocess, sys, time
        titles = ["sglang::data_parallel_controller", "sglang::scheduler_TP0", "sglang::tokenizer_worker:1", "helper"]
        for title in titles:
            subprocess.Popen([title, "-c", "import time; time.sleep(100)"], executable=sys.executable)
        lost = subprocess.Popen(["sglang::scheduler_TP1", "-c", "input()"], executable=sys.executable, stdin=subprocess.PIPE)
        print("pid", lost.pid, flush=True)
        time.sleep(1.5)
        lost.kill()
        time.sleep(100)
    """
    result = host.launch("a", argv=host.script(script))
    pid = int(host.log().read_text().split()[1])
    assert result["status"] == "crashed"
    assert result["crash"]["cause"] == f"sglang::scheduler_TP1 (pid {pid}) is gone; the server lives on without it"
    assert host.ask("stop")["status"] == "stopped"


def test_processes_that_may_come_and_go_are_no_ranks(host):
    """Only schedulers, detokenizers and the controller must outlive the server."""
    script = """
        import subprocess, sys, time
        for title in ("sglang::tokenizer_worker:1", "helper", "sglang::scheduler"):
            subprocess.Popen([title, "-c", "import time; time.sleep(100)"], executable=sys.executable)
        print("started", flush=True)
        time.sleep(100)
    """
    host.launch("a", argv=host.script(script), wait=False)
    server, _ = host.server()
    titles = until(lambda: t if len(t := [ranks.title_of(c) for c in ranks.children(server)]) == 3 else None)
    until(lambda: {ranks.title_of(c) for c in ranks.children(server)} >= {b"helper", b"sglang::scheduler"}, titles)
    looked = ranks.Ranks()
    assert looked.look(server) is None
    assert looked.look(server) is None
    for child in ranks.children(server):
        if ranks.title_of(child) != b"sglang::scheduler":
            os.kill(child, signal.SIGKILL)
            until(lambda child=child: processes.start_time(child) is None)
    assert looked.look(server, force=True) is None
    assert ranks.children(2**22 + 1) == []
    assert ranks.title_of(2**22 + 1) == b""


def test_a_server_whose_keeper_was_killed_is_still_followed(host):
    """It writes to its log itself and lives on; only the exit record will be missing."""
    host.launch("a", argv=host.script(SLEEPER), wait=False)
    behind = host.ask_behind("wait", timeout_s=60)
    behind.event("health")
    attempt = host.attempt()
    os.kill(attempt["run"]["keeper_pid"], signal.SIGKILL)
    pid, start = host.server()
    until(lambda: not processes.alive(attempt["run"]["keeper_pid"], attempt["run"]["keeper_start"]))
    assert processes.alive(pid, start)
    os.kill(pid, signal.SIGKILL)
    result = behind.finish()
    assert result["status"] == "crashed"
    assert result["crash"]["cause"] == "the process is gone and left no exit record: starting"
    assert (result["crash"]["exit_code"], result["crash"]["signal"]) == (None, None)


def test_a_keeper_that_is_slow_to_write_gets_its_moment(host, monkeypatch):
    """The process is gone, the keeper lives: its record decides, unless it never comes."""
    monkeypatch.setattr(watcher, "_RECORD_GRACE_S", 0.3)
    host.launch("a", argv=host.script(SLEEPER), wait=False)
    pid, _ = host.server()
    keeper = host.attempt()["run"]["keeper_pid"]
    os.kill(keeper, signal.SIGSTOP)
    try:
        os.kill(pid, signal.SIGKILL)
        watched = watcher.Watcher(host.context("wait"), host.attempt())
        watched.tick()
        assert not watched.ended
        until(lambda: watched.tick() or watched.ended)
        assert watched.exit is None
    finally:
        os.kill(keeper, signal.SIGCONT)
    until(lambda: host.attempt()["exit"])
    assert host.ask("wait")["crash"]["signal"] == "SIGKILL"


def test_signals_to_the_keeper_do_not_lose_the_record(host):
    """What a logout or an impatient user sends it."""
    host.launch("a", argv=host.script(SLEEPER), wait=False)
    pid, start = host.server()
    run = host.attempt()["run"]
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(run["keeper_pid"], number)
    assert processes.alive(pid, start)
    os.kill(pid, signal.SIGTERM)
    ended = until(lambda: host.attempt()["exit"])
    assert (ended["signal"], ended["status"]) == ("SIGTERM", None)
    until(lambda: not processes.alive(run["keeper_pid"], run["keeper_start"]), "the keeper's end")
    assert attempts.state_of(host.attempt()) == "crashed"


def test_orphans_of_the_server_are_reaped(host):
    """While the keeper lives, nothing of the server's stays behind as a zombie."""
    script = """
        import os, time
        if os.fork() == 0:
            if os.fork() == 0:
                time.sleep(0.3)
                os._exit(0)
            os._exit(0)
        os.wait()
        time.sleep(100)
    """
    host.launch("a", argv=host.script(script), wait=False)
    keeper = host.attempt()["run"]["keeper_pid"]

    def adopted():
        return [child for child in ranks.children(keeper) if child != host.attempt()["run"]["pid"]]

    until(adopted, "an adopted orphan")
    until(lambda: not adopted(), "the orphan's end")


def test_a_restarted_machine_is_named(host):
    """Another boot id: no process of that attempt can live, whatever has its pid now; every command says so."""
    host.launch("a", argv=host.script(SLEEPER), wait=False)
    host.rewrite("spec", boot_id="another boot")
    host.rewrite("run", boot_id="another boot")
    assert attempts.state_of(host.attempt()) == "crashed"
    # Nobody has waited yet: those that only read give the same reason.
    assert host.ask("logs", crash=True)["crash"]["cause"] == "the machine was started anew while the server ran"
    assert host.ask("status")["attempt"]["cause"] == "the machine was started anew while the server ran"
    result = host.ask("wait")
    assert (result["status"], result["exit"]) == ("crashed", 6)
    assert result["crash"]["cause"] == "the machine was started anew while the server ran"
    assert host.ask("wait")["error"]["message"].endswith("the machine was started anew while the server ran")


@pytest.mark.parametrize("fields", [{"machine": "another"}, {"node": "another"}])
def test_another_machines_attempt_is_unknown_and_not_dead(host, fields):
    """A home directory shared by machines shows attempts whose processes cannot be seen from here."""
    host.launch("a", argv=host.script(SLEEPER), wait=False)
    host.rewrite("spec", **fields)
    host.rewrite("run", boot_id="its own boot")
    assert attempts.state_of(host.attempt()) == "unknown"
    result = host.ask("wait")
    assert (result["status"], result["exit"], result["error"]["kind"]) == ("unknown", 1, "other-machine")
    stopped = host.ask("stop", attempt=1)
    assert (stopped["exit"], stopped["error"]["kind"]) == (1, "other-machine")
    assert host.attempt()["verdict"] is None


def test_an_attempt_whose_keeper_never_came(host):
    """After a minute without its first record it counts as crashed."""
    host.launch("a", argv=host.script("pass"))
    number = 2
    spec = {k: v for k, v in host.attempt(1).items() if k not in ("run", "exit", "verdict")}
    host.state.write_json(dict(spec, attempt=number, monotonic=time.monotonic()), "attempts", number, "spec.json")
    assert attempts.state_of(host.attempt(number)) == "loading"
    host.rewrite("spec", number, monotonic=time.monotonic() - 61, marker="nobody:2")
    assert attempts.state_of(host.attempt(number)) == "crashed"
    assert host.ask("logs", crash=True)["crash"]["cause"] == "it was never started: its keeper left no record"
    result = host.ask("wait", attempt=number)
    assert result["crash"]["cause"] == "it was never started: its keeper left no record"


def test_a_log_that_is_truncated_meanwhile_is_read_from_its_beginning(host):
    """logrotate's copytruncate: what comes after is not missed."""
    script = """
        import os, sys, time
        print("x" * 5000, flush=True)
        while os.fstat(1).st_size >= 5000:
            time.sleep(0.01)
        print("[2026-01-01 00:00:00] Load weight begin. avail mem=1 GB", flush=True)
        time.sleep(100)
    """
    behind = host.launch_behind("a", argv=host.script(script))
    behind.event("health")
    until(lambda: host.log().stat().st_size > 5000)
    time.sleep(watcher.TICK_S * 5)  # so that it has been read
    os.truncate(host.log(), 0)
    behind.event("phase", name="weights", state="start")


def test_a_log_that_cannot_be_read_is_no_death(host):
    """The process decides."""
    host.launch("a", load_s=1.0, wait=False)
    os.rename(host.log(), str(host.log()) + ".1")
    timed_out = host.ask("wait", timeout_s=0.5)
    assert timed_out["status"] == "timeout"
    assert watcher.Watcher(host.context("wait"), host.attempt(), from_end=True)._position == 0


def test_the_cause_is_found_in_the_part_of_the_log_that_was_not_read(host):
    """A smoke attaches at the end of the log; a death is explained from the whole."""
    host.launch("a", "--standin-die-at", "0.8", mode="sigsegv", load_s=0.2, wait=False)
    result = host.ask("wait", smoke=False)
    while result["status"] == "ready":
        result = host.ask("wait", smoke=False)
    assert (result["status"], result["crash"]["signal"]) == ("crashed", "SIGSEGV")


def test_a_probe_survives_whatever_answers():
    """No HTTP, no server, no name: all of it is "does not answer"."""
    probe = health.Probe("http://[::1]:1/health")
    until(lambda: probe.status == 0)
    assert not probe.healthy.is_set()
    probe.stop()
    broken = health.Probe("http://127.0.0.1:99999/health")
    until(lambda: broken.status == 0)
    broken.ask_now()
    broken.stop()
    assert crash.split(b"a\r\nb\rc\nd") == [b"a", b"b", b"c", b"d"]
