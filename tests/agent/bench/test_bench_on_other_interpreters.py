"""A bench on a host whose interpreter is another: the agent's floor and a recent one, over the real wire."""

import pytest
from bench_host import PROMPTS, blob_of
from test_interpreters import EngineBox, interpreter


@pytest.mark.parametrize("version", ["3.8", "3.13"])
def test_bench_cancel_crash(tmp_path, host, version):
    """Agent, generator and rendering all run there; a server that a level kills is diagnosed."""
    (tmp_path / "other").mkdir()
    box = EngineBox(tmp_path / "other", interpreter(version))
    args, _ = host.bench_args((1, 4))
    blobs = {"prompts": blob_of(PROMPTS)}
    try:
        assert box.ask("launch", **host.launch_args("a", cwd="~", mode="burst", smoke=False))["status"] == "ready"
        measured = box.ask("bench", blobs, **args)
        assert ("complete", 0) == (measured["status"], measured["exit"]), measured["error"]
        assert [6, 6] == [level["completed"] for level in measured["bench"]["levels"]]
        assert [1, 4] == [event["concurrency"] for event in box.events if event.get("state") == "done"]
        crashed = box.ask("bench", blobs, **dict(args, levels=[2, 16], requests_per_level=16))
        assert ("crashed", 6, [2]) == (
            crashed["status"],
            crashed["exit"],
            [level["concurrency"] for level in crashed["bench"]["levels"]],
        )
        assert "illegal memory access" in crashed["crash"]["cause"]
    finally:
        box.ask("stop")
