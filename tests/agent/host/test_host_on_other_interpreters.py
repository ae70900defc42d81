"""Reading, cleaning and the playbook's steps under the agent's floor and a recent interpreter, over the real wire."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import Box

from deployctl.agent import processes

VERSIONS = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser() / "versions"
TRACE = (
    "[2026-01-31 14:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
    '  File "/e/worker.py", line 20, in step\n    x = y + z\nRuntimeError: shapes\n'
)


def interpreter(version):
    """The interpreter of a version that pyenv has."""
    found = sorted(VERSIONS.glob(f"{version}.*/bin/python3"))
    assert found, f"python {version} is missing: pyenv install {version}"
    return str(found[-1])


def data(box):
    """What the last operation sent as data."""
    return b"".join(event["payload"] for event in box.events if event["event"] == "data")


@pytest.mark.parametrize("version", ["3.8", "3.13"])
def test_every_operation_that_reads_or_cleans(tmp_path, version):
    """Logs, diagnosis, status, doctor, clean, run and copy."""
    box = Box(tmp_path, interpreter(version))
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "nvidia-smi").write_text('#!/bin/sh\ncase "$1" in *apps*) ;; *) echo "0, NVIDIA H200, 4, 143771";; esac\n')
    (tools / "nvidia-smi").chmod(0o755)
    box.env["PATH"] = f"{tools}:{os.environ['PATH']}"
    (tmp_path / "dev").mkdir()
    device = tmp_path / "dev" / "nvidia0"
    device.write_text("")
    box.host["shm_dir"] = str(tmp_path)
    log = tmp_path / "logs" / "p_a.log"
    log.parent.mkdir()
    log.write_text("one\n[2026-01-31 13:00:00] two\n" + TRACE)
    folder = Path(box.host["state_dir"]) / "attempts" / "1"
    folder.mkdir(parents=True)
    marker = "0123456789abcdef:1"
    (folder.parent.parent / "machine").write_text('{"id": "0123456789abcdef"}')
    spec = {"attempt": 1, "log_tag": "a", "profile": "p", "release": None, "patches": [], "log": str(log)}
    spec.update(marker=marker, machine=processes.machine_id(), boot_id=processes.boot_id(), at=time.time(), by="ann")
    spec.update(argv=[], port=1, ready={"url": "http://127.0.0.1:1/", "timeout_s": 1}, engine="sglang", rank=0)
    (folder / "spec.json").write_text(json.dumps(spec))
    (folder / "exit.json").write_text('{"status": 1, "signal": null}')
    code = f"f = open({str(device)!r}); print(1, flush=True); import time; time.sleep(300)"
    environment = dict(os.environ, DEPLOYCTL_ATTEMPT=marker)
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) as orphan:
        orphan.stdout.readline()
        status = box.ask("status")
        assert [] == status["problems"]
        assert [(orphan.pid, 1)] == [(holder["pid"], holder["attempt"]) for holder in status["holders"]]
        assert [orphan.pid] == [entry["pid"] for entry in status["orphans"]]
        cleaned = box.ask("clean")
    assert ("clean", [orphan.pid]) == (cleaned["status"], [entry["pid"] for entry in cleaned["ended"]])
    assert "RuntimeError: shapes" == box.ask("logs", crash=True)["crash"]["cause"]
    box.ask("logs", grep="two|step", lines=1)
    assert b'  File "/e/worker.py", line 20, in step\n' == data(box)
    box.ask("logs", since="2026-01-31 13:30")
    assert TRACE.encode() == data(box)
    assert "ok" == box.ask("logs", follow=True)["status"]
    assert log.read_bytes() == data(box)
    checks = {entry["name"]: entry for entry in box.ask("doctor", ports=[])["checks"]}
    assert {True, None} >= {entry["ok"] for entry in checks.values()}
    assert checks["python"]["detail"].split()[-1].startswith(version)
    assert "ok" == box.ask("copy", {"content": b"x"}, target="~/sub/file")["status"]
    assert b"x" == (box.home / "sub" / "file").read_bytes()
    assert "x" == box.ask("run", argv=["cat", "sub/file"])["output"]
