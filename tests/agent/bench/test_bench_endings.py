"""Benches that do not end well: the server dies or is stopped, the client goes, the generator or the disk is not there."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
from launch_host import until

from deployctl.agent import processes


def kill_at(host, concurrency, number=signal.SIGKILL):
    """Have a bench's wire kill the server in the middle of a level."""

    def on_event(event):
        if event["event"] == "level" and event["state"] == "progress" and event["concurrency"] == concurrency:
            os.kill(host.server()[0], number)

    return on_event


def test_a_server_killed_in_the_middle_of_a_sweep(host):
    """Levels so far are kept, the crash is named, exit 6; the generator is ended, nothing is left over."""
    assert host.launch("a", "--standin-step-ms", "20")["status"] == "ready"
    args, wire = host.bench_args((8, 2, 4), requests_per_level=8, max_tokens=24)
    wire.on_event = kill_at(host, 2)
    result = host.ask("bench", wire, **args)
    assert ("crashed", 6) == (result["status"], result["exit"])
    assert "SIGKILL" in result["crash"]["cause"]
    assert result["crash"]["signal"] == "SIGKILL"
    assert [8] == [level["concurrency"] for level in result["bench"]["levels"]]
    assert result["bench"]["levels"][0]["completed"] == 8
    record = host.record()
    assert ("crashed", result["crash"]) == (record["state"], record["crash"])
    assert record["ended"]
    assert host.attempt()["verdict"]["state"] == "crashed"
    assert [] == host.generators()
    assert host.bench()["exit"] == 6


def test_a_scheduler_that_fails_at_a_batch_size_is_diagnosed(host):
    """The level that the server does not survive ends in its first traceback, as a launch's burst would."""
    assert host.launch("a", mode="burst", smoke=False)["status"] == "ready"
    result = host.bench((1, 4, 16), requests_per_level=16)
    assert ("crashed", 6) == (result["status"], result["exit"])
    assert "illegal memory access" in result["crash"]["cause"]
    assert result["crash"]["frames"]
    assert [1, 4] == [level["concurrency"] for level in result["bench"]["levels"]]


def test_an_engine_without_a_watchdog_dies_all_the_same(host):
    """A scheduler that is gone while its server lives on and answers its health check."""
    assert host.launch("a", mode="oldcrash", smoke=False)["status"] == "ready"
    result = host.bench((2,))
    assert ("crashed", 6) == (result["status"], result["exit"])
    assert "illegal memory access" in result["crash"]["cause"]


def test_a_cancelled_bench_keeps_its_levels_and_goes_on_where_it_was(host):
    """Ctrl-C: the generator is ended, exit 130; asked with `resume` the missing levels alone are measured."""
    assert host.launch("a", "--standin-step-ms", "20")["status"] == "ready"
    behind = host.bench_behind((8, 2, 1), requests_per_level=8, max_tokens=16)
    behind.event("level", state="progress", concurrency=2)
    behind.wire.cancelled.set()
    result = behind.finish()
    assert ("cancelled", 130) == (result["status"], result["exit"])
    assert "1 of 3 levels" in result["error"]["message"]
    before = host.record()
    assert ("cancelled", [8]) == (before["state"], [level["concurrency"] for level in before["levels"]])
    assert [] == host.generators()
    again = host.bench((8, 2, 1), requests_per_level=8, max_tokens=16, resume=1)
    assert ("complete", 0) == (again["status"], again["exit"])
    started = [event["concurrency"] for event in host.wire.named("level") if event["state"] == "start"]
    assert [2, 1] == started
    assert [8, 2, 1] == [level["concurrency"] for level in again["bench"]["levels"]]
    assert before["levels"][0] == again["bench"]["levels"][0]
    # Once more: nothing is missing, nothing is sent.
    assert host.bench((8, 2, 1), requests_per_level=8, resume=1)["status"] == "complete"
    assert [] == host.wire.named("level")
    assert host.bench((1,), resume=7)["exit"] == 2


def test_a_server_that_died_while_the_link_was_down(host):
    """The bench that goes on finds it dead: the crash is named, the levels of before are told."""
    assert host.launch("a", "--standin-step-ms", "20")["status"] == "ready"
    behind = host.bench_behind((8, 1), requests_per_level=8, max_tokens=32)
    behind.event("level", state="progress", concurrency=1)
    behind.wire.cancelled.set()
    assert behind.finish()["status"] == "cancelled"
    pid, start = host.server()
    os.kill(pid, signal.SIGKILL)
    until(lambda: not processes.alive(pid, start), "the server's end")
    result = host.bench((8, 1), requests_per_level=8, max_tokens=32, attempt=1, resume=1)
    assert ("crashed", 6, [8]) == (
        result["status"],
        result["exit"],
        [level["concurrency"] for level in result["bench"]["levels"]],
    )
    assert "SIGKILL" in result["crash"]["cause"]
    assert "crashed" == host.record()["state"]


def test_a_bench_of_which_nobody_heard_is_found_by_its_token(host):
    """A link that broke before the bench had told its number."""
    assert host.launch("a")["status"] == "ready"
    first = host.bench((1, 2), token="t1")
    assert [1, 1] == [host.bench((1, 2), token="t1")["bench"]["bench"], first["bench"]["bench"]]
    assert [] == host.wire.named("level")
    assert 2 == host.bench((1,), token="t2")["bench"]["bench"]
    assert 3 == host.bench((1,))["bench"]["bench"]


def test_one_bench_of_an_attempt_at_a_time(host):
    """Somebody else's is refused, exit 4; one's own that comes back after a lost link waits for its agent to end."""
    assert host.launch("a", "--standin-step-ms", "20")["status"] == "ready"
    behind = host.bench_behind((1, 8), requests_per_level=8, max_tokens=16, token="mine", operator="bob@example.org")
    behind.event("level", state="progress")
    refused = host.bench((1,), token="other")
    assert 4 == refused["exit"]
    assert "bob@example.org measures attempt 1 already" in refused["error"]["message"]
    again = host.bench_behind((1, 8), requests_per_level=8, max_tokens=16, token="mine")
    behind.wire.cancelled.set()
    assert behind.finish()["status"] == "cancelled"
    assert again.finish()["status"] == "complete"


def test_a_stop_ends_the_bench_and_its_generator(host):
    """Whoever stops the server does not wait for the generator, and nobody calls it a crash."""
    assert host.launch("a", "--standin-step-ms", "20")["status"] == "ready"
    behind = host.bench_behind((8, 1), requests_per_level=8, max_tokens=32)
    behind.event("level", state="progress", concurrency=1)
    stopping = threading.Thread(target=lambda: host.ask("stop"), daemon=True)
    stopping.start()
    result = behind.finish()
    stopping.join(30)
    assert ("failed", 1, "stopped") == (result["status"], result["exit"], result["error"]["kind"])
    assert [8] == [level["concurrency"] for level in result["bench"]["levels"]]
    assert result["crash"] is None
    assert host.attempt()["verdict"]["state"] == "stopped"
    until(lambda: not host.marked(), "the end of everything that was started")


def test_an_agent_that_is_killed_leaves_its_levels_and_a_generator_that_stop_ends(host, tmp_path):
    """The record is written level by level; the generator carries the attempt's mark."""
    from launch_host import Wire

    assert host.launch("a", "--standin-step-ms", "20")["status"] == "ready"
    args, wire = host.bench_args((8, 1), requests_per_level=8, max_tokens=200)
    context = host.context("bench", wire, **args)
    child = os.fork()
    if child == 0:
        from deployctl.agent.main import perform

        perform(context)
        os._exit(0)
    until(lambda: (host.record() or {}).get("levels"), "the first level")
    generator = until(host.generators, "the generator of the next level")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert ("running", [8]) == (host.record()["state"], [level["concurrency"] for level in host.record()["levels"]])
    assert host.ask("stop", Wire())["status"] == "stopped"
    assert not any(processes.alive(process.pid, process.start) for process in generator)


def test_a_generator_that_is_not_there(host):
    """An interpreter without sglang: a clear error before anything is sent."""
    assert host.launch("a")["status"] == "ready"
    bare = host.root / "bare"

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    result = host.bench((1,), pythons={"eagle3": str(bare / "bin" / "python3")})
    assert ("failed", 1, "no-generator") == (result["status"], result["exit"], result["error"]["kind"])
    assert "sglang.bench_serving" in result["error"]["message"]
    missing = host.bench((1,), pythons={"eagle3": "/nowhere/python"})
    assert (1, "cannot-run") == (missing["exit"], missing["error"]["kind"])
    assert "failed" == host.record(2)["state"]


def test_a_generator_that_lacks_a_package_or_space(host, monkeypatch):
    """What would fail in every level is said once, with the command that mends it."""
    from deployctl.agent import loadgen

    assert host.launch("a")["status"] == "ready"
    for code, kind, hint in (
        ("import datasets_of_nobody", "no-generator", "-m pip install datasets_of_nobody"),
        ("raise OSError(28, 'No space left on device')", "disk-full", "df -h"),
    ):
        monkeypatch.setattr(
            loadgen.SglangBench, "argv", lambda self, target, *rest, code=code: [target.python, "-c", code]
        )
        result = host.bench((1, 2))
        assert (1, kind) == (result["exit"], result["error"]["kind"])
        assert hint in result["error"]["hint"]
        assert [] == result["bench"]["levels"]


def test_what_a_generator_prints_is_bounded(host, monkeypatch):
    """Megabytes of output: the log is cut, the last words are kept, and the level is failed by them."""
    from deployctl.agent import bench_levels, loadgen

    assert host.launch("a")["status"] == "ready"
    monkeypatch.setattr(bench_levels, "_LOG_BYTES", 10_000)
    code = "import sys\nfor n in range(20000): print('noise', n)\nsys.exit('argument error: the end')"
    monkeypatch.setattr(loadgen.SglangBench, "argv", lambda self, target, *rest: [target.python, "-c", code])
    result = host.bench((1, 2))
    assert ("failed", 7) == (result["status"], result["exit"])
    assert "exit status 1): argument error: the end" in result["error"]["message"]
    assert 10_000 <= host.file("generator-c1.log").stat().st_size < 10_200


def test_a_disk_that_is_full_is_said(host, monkeypatch):
    """The log of a level cannot be opened or written: the levels before stay as they are."""
    assert host.launch("a")["status"] == "ready"
    args, wire = host.bench_args((1, 2))

    def fill(event):
        if event["event"] == "level" and event["state"] == "done":
            (host.file("generator-c2.log")).symlink_to("/dev/full")

    wire.on_event = fill
    result = host.ask("bench", wire, **args)
    assert (1, "disk-full") == (result["exit"], result["error"]["kind"])
    assert ("failed", [1]) == (host.record()["state"], [level["concurrency"] for level in host.record()["levels"]])
    assert [] == host.generators()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"levels": []}, "1 to 64 different levels"),
        ({"levels": [2, 2]}, "1 to 64 different levels"),
        ({"levels": [0]}, "levels are numbers from 1 to 4096"),
        ({"max_tokens": 3}, "max_tokens must be 4 or more"),
        ({"requests_per_level": 0}, "requests_per_level must be"),
        ({"levels": [4], "requests_per_level": 3}, "3 requests are never 4 at once"),
        ({"seed": -1}, "a seed is a number"),
    ],
)
def test_a_load_that_cannot_be_measured_is_refused(host, changes, said):
    """Whoever asks: nothing is started, exit 2."""
    args, wire = host.bench_args()
    args.update(changes)
    result = host.ask("bench", wire, **args)
    assert 2 == result["exit"]
    assert said in result["error"]["message"]


def test_a_bench_needs_prompts_and_a_server(host):
    """No attempt, none of that tag, no prompts, a server that is not ready."""
    assert host.bench()["exit"] == 2
    slow = host.launch_behind("a", load_s=30)
    slow.event("attempt")
    assert 5 == host.bench()["exit"]
    assert host.ask("stop")["status"] == "stopped"
    slow.finish()
    assert host.launch("b")["status"] == "ready"
    assert 2 == host.bench(prompts=[])["exit"]
    assert 2 == host.bench(log_tag="nothing")["exit"]
    assert 2 == host.bench(attempt=1)["exit"]
    assert host.bench((1,), log_tag="b")["status"] == "complete"
    assert json.loads(host.file("bench.json", attempt=2).read_text())["log_tag"] == "b"


def test_a_server_of_another_machine_and_a_folder_that_is_none(host):
    """A shared home directory shows attempts that cannot be measured from here; what stands in the way is named."""
    assert host.launch("a")["status"] == "ready"
    folder = host.file("x").parent.parent
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("in the way")
    refused = host.bench((1,))
    assert (1, True) == (refused["exit"], "bench" in refused["error"]["message"])
    folder.unlink()
    node = host.attempt()["node"]
    host.rewrite("spec", node="elsewhere")
    refused = host.bench((1,))
    assert (1, "other-machine") == (refused["exit"], refused["error"]["kind"])
    host.rewrite("spec", node=node)
    (folder / "1").mkdir(parents=True)
    (folder / "lock").write_text("torn")
    assert 2 == host.bench((1,))["bench"]["bench"], "a folder without a record is nobody's bench, and stays"


def test_a_generator_without_a_version_and_a_server_that_is_no_python(host):
    """A server behind a shell script: the host's interpreter measures it; a package without metadata has no version."""
    wrapper = host.root / "serve.sh"
    wrapper.write_text(f'#!/bin/sh\nexec {host.python} -m sglang.launch_server "$@"\n')
    wrapper.chmod(0o755)
    argv = [str(wrapper), "--model-path", "/m", "--port", str(host.port), "--standin-load", "0.3"]
    assert host.launch("a", argv=argv)["status"] == "ready"
    result = host.bench((1,))
    assert ("complete", "0.5.12+standin") == (result["status"], result["bench"]["generator"]["version"])
    host.rewrite("spec", cwd="/nowhere", env={"PYTHONPATH": str(host.python.parent), "X": "1"})
    site = host.root / "bare"
    site.mkdir()
    source = next(host.python.parent.parent.rglob("site-packages/sglang"))
    (site / "sglang").symlink_to(source)
    host.rewrite("spec", env={"PYTHONPATH": str(site)})
    bare = host.bench((1,), pythons={"eagle3": sys.executable})
    assert ("complete", None) == (bare["status"], bare["bench"]["generator"]["version"])


def test_a_record_that_cannot_be_written(host, monkeypatch):
    """A disk that fills up between two levels: said, and what was written before is whole."""
    from deployctl.agent import bench
    from deployctl.agent.failure import Failure

    assert host.launch("a")["status"] == "ready"
    written = []

    def write(self):
        written.append(len(self.record["levels"]))
        if self.record["levels"]:
            raise Failure("no space left on /", kind="disk-full")
        original(self)

    original = bench._Sweep._write
    monkeypatch.setattr(bench._Sweep, "_write", write)
    result = host.bench((1, 2))
    assert (1, "disk-full") == (result["exit"], result["error"]["kind"])
    assert ([0, 1, 1], "running") == (written, host.record()["state"])
    assert [1] == [level["concurrency"] for level in result["bench"]["levels"]]
