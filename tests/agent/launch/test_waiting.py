"""Detaching and coming back: a wait is stateless, several may wait, and a lost link is not death."""

import os
import signal
import time
import urllib.request
from pathlib import Path

import pytest
from launch_host import Wire, until

from deployctl.agent import attempts, crash, lock, phases, processes, watch, watcher

SLEEPER = "import time\nprint('starting', flush=True)\ntime.sleep(120)\n"


def test_a_lost_link_leaves_the_load_alone_and_a_wait_comes_back(host):
    """Detached: exit 130, the verdict open, the server untouched; the wait reads the whole load again."""
    behind = host.launch_behind("a", load_s=1.5)
    behind.event("phase", name="weights", state="start")
    behind.wire.cancelled.set()
    detached = behind.finish()
    assert (detached["status"], detached["exit"], detached["error"]["kind"]) == ("loading", 130, "detached")
    assert "deployctl wait" in detached["error"]["hint"]
    assert host.attempt()["verdict"] is None
    assert processes.alive(*host.server())
    result = host.ask("wait", resumed=True)
    assert (result["status"], result["attempt"]) == ("ready", 1)
    assert [phase["name"] for phase in result["phases"]] == ["init", "weights", "kv-cache", "graphs", "warm-up"]
    assert result["smoke"]["ok"]


def test_two_may_wait_at_once(host):
    """Both get the verdict."""
    behind = host.launch_behind("a", load_s=1.0)
    behind.event("health")
    second = host.ask("wait", operator="bob@example.org")
    assert [second["status"], behind.finish()["status"]] == ["ready", "ready"]


def test_status_asks_a_load_that_nobody_watches(host):
    """Loading with its phase, then ready, though no watcher wrote a verdict; without its log it is there all the same."""
    host.launch("a", wait=False, load_s=1.0)
    until(lambda: b"Load weight begin" in host.log().read_bytes())
    server = host.ask("status")["server"]
    assert (server["state"], server["phase"]) == ("loading", "weights")
    assert server["uptime_s"] < 30
    until(lambda: b"fired up" in host.log().read_bytes())
    server = host.ask("status")["server"]
    assert (server["state"], server["phase"], server["pid"]) == ("ready", None, host.server()[0])
    os.rename(host.log(), str(host.log()) + ".1")
    server = host.ask("status")["server"]
    assert (server["state"], server["pid"]) == ("loading", host.server()[0])


def test_a_late_wait_knows_when_it_became_ready(host):
    """The ready line's own stamp tells, and not when somebody looked: the ETA learns from it."""
    host.launch("a", wait=False, load_s=0.3)
    until(lambda: b"fired up" in host.log().read_bytes())
    host.rewrite("spec", monotonic=host.attempt()["monotonic"] - 1000)
    result = host.ask("wait")
    assert result["status"] == "ready"
    assert result["ready_seconds"] < 100
    assert attempts.expectation(host.state, "eagle3")["ready_seconds"] == result["ready_seconds"]


def test_an_engine_without_a_ready_line_that_was_met_late(host):
    """The time is an upper bound: marked as late, and nothing to learn an ETA from."""
    script = """
        import http.server, sys
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
        http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
    """
    host.launch("a", argv=host.script(script), engine="openai", wait=False, smoke_spec=None)
    host.rewrite("spec", monotonic=host.attempt()["monotonic"] - 1000)
    result = host.ask("wait")
    assert (result["status"], result["smoke"]) == ("ready", None)
    assert host.attempt()["verdict"]["late"]
    assert result["ready_seconds"] > 1000
    assert [phase["name"] for phase in result["phases"]] == ["init"]
    assert attempts.expectation(host.state, "eagle3") is None


def test_waiting_for_what_is_ready_smokes_it_again(host):
    """The times of its load stay as they were."""
    first = host.launch("a", smoke=False)
    again = host.ask("wait", burst=2)
    assert (again["status"], again["ready_seconds"]) == ("ready", first["ready_seconds"])
    assert again["phases"] == first["phases"]
    assert again["smoke"]["burst"]["answered"] == 2


def test_ctrl_c_in_a_smoke_is_no_failed_smoke(host):
    """Nothing was found out about the answers: the server stays ready."""
    wire = Wire()
    wire.on_event = lambda event: wire.cancelled.set() if event["event"] == "ready" else None
    result = host.launch("a", wire=wire, burst=4)
    assert (result["status"], result["exit"]) == ("ready", 130)
    assert "smoke was not finished" in result["error"]["message"]
    assert host.attempt()["verdict"]["state"] == "ready"
    wire = Wire()
    wire.on_event = lambda event: wire.cancelled.set() if event["event"] == "burst" else None
    assert host.ask("wait", wire, burst=4)["exit"] == 130
    assert "smoke" not in host.attempt()["verdict"]


def test_the_timeout_counts_from_the_launch_after_a_lost_link(host):
    """`resumed` does not give a load its whole time again."""
    host.launch("a", wait=False, load_s=30)
    host.rewrite("spec", monotonic=host.attempt()["monotonic"] - 1000)
    timed_out = host.ask("wait", timeout_s=900, resumed=True)
    assert (timed_out["status"], timed_out["exit"]) == ("timeout", 5)
    assert "not ready within 900 s: phase" in timed_out["error"]["message"]
    assert "last line:" in timed_out["error"]["message"]


def test_asking_without_waiting_says_how_it_stands(host):
    """What a launch without wait asks after a lost link."""
    host.launch("a", wait=False, load_s=1.0)
    assert host.ask("wait", wait=False, run_id="run-1")["status"] == "loading"
    assert host.ask("wait")["status"] == "ready"
    assert host.ask("wait", wait=False)["status"] == "ready"
    assert host.ask("wait", wait=False)["ready_seconds"]
    host.ask("stop")
    assert host.ask("wait", wait=False)["status"] == "stopped"


def test_the_attempt_of_a_command_is_found_also_before_it_is_there(host):
    """The link broke while the launch was cleaning cards: as long as it holds the lock, it may yet start one."""
    assert host.ask("wait", run_id="run-1")["exit"] == 2
    with lock.exclusive(host.context("launch")):
        behind = host.ask_behind("wait", run_id="run-1", wait=False)
        other = host.ask("wait", run_id="run-2")
        assert (other["exit"], other["error"]["kind"]) == (2, "unknown-attempt")
        spec = {
            **host.launch_args("a"), "attempt": 1, "log_tag": "a", "log": "/nowhere", "release": None, "patches": [],
            "machine": processes.machine_id(), "boot_id": processes.boot_id(), "at": time.time(), "run_id": "run-1",
            "marker": "x:1", "by": "ann",
        }  # fmt: skip
        assert behind.thread.is_alive()
        host.state.write_json(spec, "attempts", 1, "spec.json")
        assert behind.finish()["attempt"] == 1
        wire = Wire()
        wire.cancelled.set()
        assert host.ask("wait", wire, run_id="run-3")["exit"] == 2


def test_a_launch_that_never_starts_one_is_not_waited_for_long(host, monkeypatch):
    """Bounded, though its holder lives."""
    monkeypatch.setattr(watch, "_LAUNCH_PATIENCE_S", 0.2)
    with lock.exclusive(host.context("launch")):
        assert host.ask("wait", run_id="run-1")["exit"] == 2


def test_rank_1_counts_as_long_as_it_lives(host):
    """Its own health is 200 for ever; rank 0 decides when it is enough."""
    behind = host.launch_behind("a", argv=host.script(SLEEPER), rank=1, nodes=2, watch="alive", smoke=False)
    behind.event("attempt")
    until(lambda: host.log().stat().st_size)
    assert behind.thread.is_alive()
    behind.wire.controls.append({"control": "enough"})
    result = behind.finish()
    assert (result["status"], result["exit"], result["smoke"]) == ("ready", 0, None)
    assert host.attempt()["verdict"]["state"] == "ready"


def test_rank_1_that_dies_is_a_crash(host):
    """Alive by all."""
    behind = host.launch_behind("a", argv=host.script(SLEEPER), rank=1, nodes=2, watch="alive", smoke=False)
    behind.event("attempt")
    os.kill(host.server()[0], signal.SIGKILL)
    assert (behind.finish()["status"], behind.result["crash"]["signal"]) == ("crashed", "SIGKILL")


def test_rank_1_is_left_alone_when_its_client_goes(host):
    """Detached like any other."""
    behind = host.launch_behind("a", argv=host.script(SLEEPER), rank=1, nodes=2, watch="alive", smoke=False)
    behind.event("attempt")
    behind.wire.cancelled.set()
    assert behind.finish()["exit"] == 130
    assert processes.alive(*host.server())


def test_a_wait_on_rank_1_needs_no_ready_line_and_no_smoke(host):
    """A user's plain `wait` on the second host: its health server answers once its schedulers are loaded."""
    host.launch("a", load_s=0.2, wait=False, rank=1, nodes=2)
    log = host.log()
    until(lambda: b"Uvicorn" in log.read_bytes())
    result = host.ask("wait")
    assert (result["status"], result["smoke"]) == ("ready", None)


def test_the_ready_line_may_have_been_rotated_away(host):
    """An attempt that was ready once needs no line a second time."""
    host.launch("a", smoke=False)
    os.truncate(host.log(), 0)
    assert host.ask("wait")["status"] == "ready"


def test_a_health_answer_of_200_with_a_dying_scheduler_is_not_ready(host, monkeypatch):
    """Doomed servers are given no verdict of ready."""
    monkeypatch.setattr(watcher, "TERMINAL_GRACE_S", 0.5)
    script = """
        import http.server, sys
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
        print("Scheduler hit an exception: x", flush=True)
        http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
    """
    assert host.launch("a", argv=host.script(script), engine="openai")["status"] == "crashed"


@pytest.mark.parametrize("cut", [1, 7, 64])
def test_a_log_that_comes_in_pieces_gives_the_same_phases(host, cut):
    """Lines are cut anywhere, progress bars end theirs with a carriage return."""
    host.launch("a", argv=host.script(SLEEPER), wait=False)
    text = (
        b"[2026-01-01 00:00:00] Load weight begin. avail mem=1 GB\n"
        b"\rLoading safetensors checkpoint shards:   0% Completed | 0/4 [00:00<?, ?it/s]\n"
        b"\rLoading safetensors checkpoint shards:  50% Completed | 2/4 [00:00<00:00, 9.1it/s]\n"
        b"\r\n[2026-01-01 00:00:01] Load weight end. elapsed=1 s\n"
        b"\rCapturing batches:  50%|##  | 1/2 [00:00<00:00]\rCapturing batches: 100%|####| 2/2 [00:00<00:00]\n"
        b"[2026-01-01 00:00:02] The server is fired up and ready to roll!\n"
    )
    until(lambda: host.log().stat().st_size, "the first line")
    os.truncate(host.log(), 0)
    context = host.context("wait")
    watched = watcher.Watcher(context, host.attempt())
    watched.tick()
    with host.log().open("ab", buffering=0) as log:
        for at in range(0, len(text), cut):
            log.write(text[at : at + cut])
            watched.tick()
    assert [name for name, _ in watched.phase.phases] == ["init", "weights", "kv-cache", "graphs", "warm-up"]
    assert watched.phase.ready_line
    assert not watched.late
    shown = [event["progress"] for event in context.wire.named("phase") if event["state"] == "progress"]
    assert shown == sorted(shown[:2]) + sorted(shown[2:])
    assert 0.5 in shown


def test_a_log_of_many_megabytes_is_read_through(host):
    """In chunks, with progress told once per chunk and no line without an end kept whole."""
    host.launch("a", argv=host.script(SLEEPER), wait=False)
    until(lambda: host.log().stat().st_size, "the first line")
    bar = b"\rLoading safetensors checkpoint shards:  25% Completed | 1/4 [00:00<00:01, 2.32it/s]\n"
    with host.log().open("ab") as log:
        log.write(b"[2026-01-01 00:00:00] Load weight begin. avail mem=1 GB\n" + bar * 20000 + b"y" * 200000)
    context = host.context("wait")
    watched = watcher.Watcher(context, host.attempt())
    watched.tick()
    while watched.behind:
        watched.tick()
    assert watched.phase.phase == "weights"
    assert 1 <= len([event for event in context.wire.named("phase") if event["state"] == "progress"]) <= 3
    assert len(watched._buffer) == 65536


CAPTURED = Path(__file__).parents[2] / "engine" / "env" / "captured"
TELLING = (
    b"Scheduler hit an exception: Traceback (most recent call last):",
    b"SIGQUIT received. signum=3, frame=None. It usually means one child failed.",
    b"Received sigquit from a child process. It usually means the child failed.",
    b"Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering SIGQUIT for cleanup...",
    b"Rank 0 scheduler is dead. Please check if there are relevant logs.",
    b"Exit code: -9",
    b"Initialization failed. warmup error: x",
    b"[Errno 98] error while attempting to bind on address ('127.0.0.1', 1): address already in use",
    b"Port 30000 is already in use",
    b"launch_server.py: error: the following arguments are required: --model-path",
    b"Not enough memory. Please try to increase --mem-fraction-static.",
    b"Capture cuda graph failed: x",
    b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
    b"Out of memory even after retracting all other requests in the decode batch.",
    b"Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)",
    b"Watchdog caught collective operation timeout: x",
    b"  what():  x",
    b"terminate called after throwing an instance of 'c10::Error'",
    b"Fatal Python error: Segmentation fault",
    b"Segmentation fault (core dumped)",
    b"deployctl: cannot start the server: x",
    b"/usr/bin/python3: No module named sglang",
    b"Current thread 0x00007f (most recent call first):",
    b"  + Exception Group Traceback (most recent call last):",
    b"[ts] INFO:     Application startup complete.",
    b"CAPTURE CUDA GRAPH BEGIN. x",
    b"Capture target verify CUDA graph begin. backend=x",
    b"Multi-thread loading shards:  50% Completed | 2/4 [00:00<00:00, 9.1it/s]",
    b"Post-capture KV sizing: x",
)


def lines_of_logs():
    found = {line for path in sorted(CAPTURED.glob("*.log")) for line in crash.split(path.read_bytes())}
    return sorted(found | set(TELLING))


def told_by(scanner):
    return (scanner.terminal, scanner.cause(), scanner._chained, scanner._had_usage, bool(scanner._open))


@pytest.mark.parametrize("before", [(), (b"Traceback (most recent call last):", b"ValueError: x"), (b"Exit code: -9",)])
def test_what_is_skipped_would_have_taught_nothing(before):
    """Of every line of every captured log: where quiet() says so, feed() and advance() leave all as it was."""
    skipped = 0
    for line in lines_of_logs():
        scanner, state = crash.CrashScanner(), phases.State(since=1.0)
        for earlier in before:
            scanner.feed(earlier)
        if scanner.quiet(line + b"\n"):
            told, pending = told_by(scanner), len(scanner._blocks) + len(scanner._singles)
            scanner.feed(line)
            assert told == told_by(scanner), line
            assert pending == len(scanner._blocks) + len(scanner._singles), line
            skipped += 1
        for phase in phases.ORDER:
            at = state._replace(phase=phase)
            if phases.quiet(at, line):
                assert (at, []) == phases.advance(at, line, 2.0), line
    assert skipped > 100
    assert not any(crash.CrashScanner().quiet(line) for line in TELLING[:24])


def test_blocks_are_the_whole_and_end_with_lines():
    """Whatever the lines' lengths; the last may end anywhere."""
    content = b"".join(b"x" * (at * 37 % 3000) + b"\n" for at in range(500)) + b"rest"
    pieces = list(crash.blocks(content))
    assert content == b"".join(pieces)
    assert all(piece.endswith(b"\n") for piece in pieces[:-1])
    assert len(pieces) > 5
    assert [] == list(crash.blocks(b""))


def test_a_log_that_grows_faster_than_it_is_read_hides_neither_an_end_nor_ctrl_c(host, monkeypatch):
    """Every line takes reading: still the time limit, the exit and the cause come within moments."""
    monkeypatch.setattr(watcher, "_LOOK_S", 0.01)
    monkeypatch.setattr(watcher, "_LAST_LOOK_S", 0.01)
    host.launch("a", argv=host.script(SLEEPER), wait=False)
    until(lambda: host.log().stat().st_size, "the first line")
    with host.log().open("ab") as log:
        for _ in range(40):
            log.write(b"warning: error: of a compiler, of no meaning here\n" * 20000)
        log.write(b"Traceback (most recent call last):\nRuntimeError: at the end of it all\n")
    wire = Wire()
    wire.cancelled.set()
    assert 130 == host.ask("wait", wire)["exit"]
    watched = watcher.Watcher(host.context("wait"), host.attempt())
    watched.tick()
    assert watched.behind
    os.kill(host.server()[0], signal.SIGKILL)
    until(lambda: host.attempt()["exit"])
    began = time.monotonic()
    result = host.ask("wait")
    assert ("crashed", "RuntimeError: at the end of it all") == (result["status"], result["crash"]["cause"])
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(("fate", "said"), [("delete", "deleted"), ("move", "moved away"), ("truncate", "truncated")])
def test_a_log_that_somebody_takes_away_during_the_load(host, fate, said):
    """What the server writes is read from what it holds open; a wait that gives up says what happened to the log."""
    script = """
        import http.server, os, sys
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                if self.path == "/ready":
                    print("The server is fired up and ready to roll!", flush=True)
                self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
        print("Load weight begin", "." * 200, flush=True)
        http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
    """
    behind = host.launch_behind("a", argv=host.script(script), smoke=False)
    behind.event("phase", name="weights", state="start")
    if fate == "truncate":
        os.truncate(host.log(), 0)
    elif fate == "delete":
        host.log().unlink()
    else:
        host.log().rename(str(host.log()) + ".1")
        host.log().write_text("of somebody else\n")
    behind.event("health", status=200)
    if fate != "truncate":  # which is not seen by whoever comes later
        waited = host.ask("wait", timeout_s=0.5, smoke=False)
        assert "timeout" == waited["status"]
        assert f"the log was {said} under the server" in waited["error"]["message"]
        assert "phase weights" in waited["error"]["message"]
    until(lambda: urllib.request.urlopen(f"http://127.0.0.1:{host.port}/ready", timeout=5).status == 200)
    result = behind.finish()
    assert ("ready", 0) == (result["status"], result["exit"]), result["error"]


def test_no_pattern_takes_the_square_of_a_lines_length():
    """A line may hold a whole request: a pattern that begins with `.*` would stall the watch for minutes."""
    patterns = [*crash._SINGLE, crash._TERMINAL, crash._PROGRESS, crash._SECONDARY, phases._READY]
    patterns += [pattern for _, pattern in phases._MARKS]
    assert not [
        p.pattern for p in patterns if p.pattern.startswith(b".*") or b"|.*" in p.pattern or b"(.*" in p.pattern
    ]
    scanner = crash.CrashScanner()
    for text in (b"x" * 2_000_000, b" " * 2_000_000, b"Scheduler" * 200_000, b"x: error: argument " * 100_000):
        scanner.feed(text)
        phases.advance(phases.State(since=0.0), text, 1.0)
    assert len(scanner.cause()[0]) <= 1000
