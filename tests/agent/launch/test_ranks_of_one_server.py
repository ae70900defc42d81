"""One server over two hosts: ready by rank 0, alive by all."""

import os
import signal

import pytest
from launch_host import LaunchHost, free_port, until

from deployctl.agent import processes


@pytest.fixture
def pair(tmp_path, engine_python):
    """Two hosts of this machine, each with its state."""
    hosts = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        hosts.append(LaunchHost(tmp_path / name, engine_python))
    yield hosts
    for host in hosts:
        host.end()


def start(pair, load_s=0.5):
    """Launch both ranks; returns what is under way."""
    words = ["--tp", "2", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}"]
    second = pair[1].launch_behind(
        "a", *words, "--node-rank", "1", load_s=load_s, rank=1, nodes=2, watch="alive", smoke=False
    )
    first = pair[0].launch_behind("a", *words, "--node-rank", "0", load_s=load_s, rank=0, nodes=2)
    return first, second


def test_two_ranks_become_one_server(pair):
    """Rank 0 is followed to ready and smoked; rank 1 counts while it lives, with phases of its own."""
    first, second = start(pair)
    ready = first.finish()
    assert (ready["status"], ready["smoke"]["ok"]) == ("ready", True), ready["error"]
    assert second.thread.is_alive()
    second.wire.controls.append({"control": "enough"})
    alive = second.finish()
    assert (alive["status"], alive["exit"]) == ("ready", 0)
    assert "weights" in [phase["name"] for phase in alive["phases"]]
    for host in pair:
        assert host.ask("stop")["status"] == "stopped"


def test_a_rank_that_dies_during_the_load_is_named_on_its_own_host(pair):
    """The other waits in silence, as collective operations do; it is detached and left to be stopped."""
    first, second = start(pair, load_s=20)
    first.event("phase", name="weights", state="start")
    second.event("phase", name="weights", state="start")
    os.kill(pair[1].server()[0], signal.SIGKILL)
    assert second.finish()["status"] == "crashed"
    first.wire.cancelled.set()
    assert first.finish()["exit"] == 130
    assert processes.alive(*pair[0].server())
    assert pair[0].ask("stop")["status"] == "stopped"


def test_rank_0_may_wait_for_the_others_as_long_as_they_take(pair):
    """No word and no port while it waits for rank 1 is no death."""
    words = ["--tp", "2", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}"]
    first = pair[0].launch_behind("a", *words, "--node-rank", "0", load_s=0.4, nodes=2)
    first.event("health", status=0)
    until(lambda: b"Init torch distributed begin" in pair[0].log().read_bytes())
    assert first.thread.is_alive()
    pair[1].launch("a", *words, "--node-rank", "1", load_s=0.4, rank=1, nodes=2, wait=False)
    assert first.finish()["status"] == "ready"
