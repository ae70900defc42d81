"""The whole loop against real SGLang 0.5.12: push, launch, smoke, burst, a patch that breaks at run time, back again."""

import json
import os
import signal

from sshd_rig import until

BREAKS = '''\
# /// deployctl
# package = "sglang"
# versions = ">=0.5.12,<0.5.13"
# targets = ["srt/managers/scheduler.py"]
# verify = ["sglang.srt.managers.scheduler"]
# ///
"""Breaks when more than five requests run at once, as the story's patches did."""
import pathlib, sys
target = pathlib.Path(sys.argv[1]) / "srt/managers/scheduler.py"
text = target.read_text()
anchor = '        """Run a batch."""\\n'
assert text.count(anchor) == 1, text.count(anchor)
addition = """        if len(batch.reqs) > 5:
            width, given = 160, 2
            raise RuntimeError("The size of tensor a (%d) must match the size of tensor b (%d)" % (width, given))
"""
target.write_text(text.replace(anchor, anchor + addition))
'''


def test_the_loop_on_the_real_engine(engine_host):
    """Everything that the four commands promise, on the engine that they are for."""
    run = engine_host.run
    worker = engine_host.package / "srt" / "speculative" / "eagle_worker.py"
    pristine = worker.read_bytes()

    push = run("push", "--patch", "v3", "--host", "10.1.230.174")
    assert push.returncode == 0, push.stderr
    assert "KNOWN BAD" in push.stderr
    assert b"dynamic_spec/v3" in worker.read_bytes()

    launch = run("launch", "--log-tag", "t5_v3", "--", "--speculative-disable-batch-threshold", "8")
    assert launch.returncode == 0, launch.stdout + launch.stderr
    for phase in ("init", "weights", "kv-cache", "warm-up"):
        assert phase in launch.stdout
    assert "burst: 10 of 10 answered" in launch.stdout

    logs = run("logs", "--grep", "server_args=")
    assert "speculative_disable_batch_threshold=8" in logs.stdout

    status = json.loads(run("status", "--json").stdout)["hosts"]["10.1.230.174"]
    assert status["server"]["state"] == "ready"
    assert run("stop").returncode == 0
    assert not schedulers(engine_host)

    rollback = run("rollback")
    assert rollback.returncode == 0, rollback.stderr
    assert worker.read_bytes() == pristine


def test_a_run_time_crash_is_traced_to_the_patch(engine_host):
    """Imports, loads and answers one request; ten at once crash it, and the patched line is named."""
    run = engine_host.run
    folder = engine_host.work / "patches" / "breaks"
    folder.mkdir()
    (folder / "b1.py").write_text(BREAKS)
    assert run("push", "--patch", "b1").returncode == 0
    value = json.loads(run("launch", "--log-tag", "b1", "--json").stdout)["hosts"]["10.1.230.174"]
    assert value["status"] == "crashed", value
    crash = value["crash"]
    assert crash["cause"] == "RuntimeError: The size of tensor a (160) must match the size of tensor b (2)"
    assert crash["patched"]["patch"] == "breaks/b1"
    assert crash["patched"]["file"] == "srt/managers/scheduler.py"
    assert crash["patched"]["text"].startswith("raise RuntimeError(")
    assert "patched line: breaks/b1" in run("logs", "--crash").stdout

    assert run("rollback").returncode == 0
    again = run("launch", "--log-tag", "b1")
    assert again.returncode == 0, again.stderr

    # The launcher dies by SIGKILL: whatever it leaves is found and ended.
    pid = json.loads(run("status", "--json").stdout)["hosts"]["10.1.230.174"]["server"]["pid"]
    os.kill(pid, signal.SIGKILL)
    stop = run("stop")
    assert stop.returncode == 0, stop.stderr
    until(lambda: not schedulers(engine_host), what="the end of all schedulers")
    status = json.loads(run("status", "--json").stdout)["hosts"]["10.1.230.174"]
    assert status["server"] is None
    assert status["orphans"] == []


def schedulers(engine_host) -> list[int]:
    """Pids of everything that carries this host's mark."""
    machine = json.loads((engine_host.sshd.home / ".deployctl" / "machine").read_text())["id"]
    needle = f"DEPLOYCTL_ATTEMPT={machine}:".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/environ", "rb") as source:
                    if needle in source.read():
                        found.append(int(name))
            except OSError:
                continue
    return found
