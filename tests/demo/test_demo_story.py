"""`deployctl demo`: the story goes as told, and leaves nothing behind however it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from demo_engine import DEADLINE_S, until

STORY_S = 90.0
TAGS = ("t1_v1", "t2_v2", "t3_v3")


@pytest.fixture
def demo(tmp_path):
    """Starts an interpreter whose temporary files lie in `tmp_path`."""
    started = []

    def start(*words):
        process = subprocess.Popen(
            [sys.executable, *words],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
    for pid in processes_in(tmp_path):
        os.kill(pid, signal.SIGKILL)


def processes_in(folder):
    """pid → command line of the processes whose command line names a demo in the folder."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"{folder}/deployctl-demo-" in line:
            found[int(entry.name)] = line
    return found


def serving(folder):
    return any("sglang.launch_server" in line for line in processes_in(folder).values())


def test_the_story_goes_as_told(demo, tmp_path):
    """Two patches crash in their own lines, the third works; all is gone after."""
    told = demo("-c", "import sys; from deployctl.demo.story import tell; sys.exit(tell(load_s=0.3))")
    text, _ = told.communicate(timeout=STORY_S)
    assert 0 == told.returncode, text
    acts = text.split("$ deployctl ")
    first, second, third = (next(act for act in acts if act.startswith(f"launch --log-tag {tag}")) for tag in TAGS)
    assert "size of tensor a (160) must match the size of tensor b (2)" in first
    assert "dynamic_spec/v1" in first
    assert "rows = self.target_worker.forward_batch_generation(batch)" in first
    assert "too many values to unpack (expected 2)" in second
    assert "out_cache_loc, _ = alloc_token_slots(batch.tree_cache, batch.batch_size())" in second
    assert "10 of 10 answered" in third
    assert {} == processes_in(tmp_path)
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_an_end_in_the_middle_leaves_no_server(demo, tmp_path, number):
    """Termination, a closed terminal and Ctrl-C while a server loads: stopped, removed."""
    told = demo("-m", "deployctl", "demo")
    until(lambda: told.poll() is not None or serving(tmp_path))
    assert told.poll() is None, told.communicate()[0]
    told.send_signal(number)
    told.communicate(timeout=DEADLINE_S)
    assert 130 == told.returncode
    assert {} == processes_in(tmp_path)
    assert [] == list(tmp_path.iterdir())
