"""The whole way on a host whose interpreter is another: the agent's floor and a recent one, over the real wire."""

import os
from pathlib import Path

import pytest
from launch_host import until
from support import Box

from deployctl.demo.site import build_site

VERSIONS = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser() / "versions"


def interpreter(version):
    """The interpreter of a version that pyenv has."""
    found = sorted(VERSIONS.glob(f"{version}.*/bin/python3"))
    assert found, f"python {version} is missing: pyenv install {version}"
    return found[-1]


class EngineBox(Box):
    """A host with the stand-in engine instead of the small package."""

    def __init__(self, root, python):
        self.root, self.home = root, root / "home"
        self.home.mkdir()
        self.python = build_site(root, python=str(python))
        self.host = {
            "name": "box",
            "package": "sglang",
            "python": str(self.python),
            "state_dir": str(root / "state"),
            "log_dir": str(root / "logs"),
            "gpu": {"devices": str(root / "dev" / "nvidia[0-9]*"), "clean": "ours"},
            "limits": {"term_grace_s": 5, "kill_patience_s": 5, "gpu_memory_s": 3, "burst_s": 10},
        }
        self.env = {"HOME": str(self.home), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
        self.events, self.run_id, self.operator = [], "run-1", "ann@example.org"


@pytest.mark.parametrize("version", ["3.8", "3.13"])
def test_launch_smoke_burst_crash_and_stop(tmp_path, host, version):
    """Everything that runs on the host: agent, keeper, watch, smoke, diagnosis, stop."""
    (tmp_path / "other").mkdir()
    box = EngineBox(tmp_path / "other", interpreter(version))
    try:
        ready = box.ask("launch", **host.launch_args("a", cwd="~", burst=6))
        assert (ready["status"], ready["exit"]) == ("ready", 0), ready["error"]
        assert ready["smoke"]["burst"]["answered"] == 6
        assert [event["event"] for event in box.events if event["event"] in ("ready", "smoke")] == ["ready", "smoke"]
        assert box.ask("launch", **host.launch_args("b"))["exit"] == 10
        replaced = box.ask("launch", **host.launch_args("b", mode="burst", replace=True, burst=8))
        assert (replaced["status"], replaced["exit"]) == ("crashed", 6)
        assert "illegal memory access" in replaced["crash"]["cause"]
        quick = box.ask("launch", **host.launch_args("c", wait=False, load_s=0.5))
        assert quick["status"] == "loading"
        assert box.ask("wait")["status"] == "ready"
        assert box.ask("smoke")["status"] == "ready"
    finally:
        stopped = box.ask("stop")
    assert (stopped["status"], stopped["exit"]) == ("stopped", 0)
    assert box.ask("wait")["status"] == "stopped"
    until(lambda: not os.path.exists(f"/proc/{quick['pid']}"), "the server's end")
