"""Kill the client, or the SSH connection, at every boundary of a push and of a rollback, over a real sshd."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rig import Rig
from sshd_rig import until

PUSHER = Path(__file__).with_name("pusher.py")


def start(rig: Rig, operation: str, at: int, args: dict) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(PUSHER), operation, "v3", json.dumps({**args, "pause_at": at})],
        env=rig.environment,
        cwd=rig.work,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def settled(rig: Rig) -> dict:
    """The history, once the agent that lost its client is through."""
    return until(
        lambda: (h := rig.host("history"))["push_in_progress"] is None and h, what="the end of the transaction"
    )


@pytest.mark.parametrize("operation", ["push", "rollback"])
@pytest.mark.parametrize("victim", ["client", "connection"])
def test_old_or_new_whatever_is_killed(tmp_path, operation, victim):
    """At each boundary in turn: the next command finds exactly the release before or exactly the one after."""
    with Rig(tmp_path) as rig:
        base = rig.tree()
        assert rig.host("push", "--patch", "v3")["status"] == "pushed"
        patched = rig.tree()
        if operation == "push":
            assert rig.host("rollback", "--to", "base")["status"] == "rolled_back"
        old, new = (base, patched) if operation == "push" else (patched, base)
        args = {} if operation == "push" else {"to": "base"}
        seen = set()
        for at in range(1, 60):
            process = start(rig, operation, at, args)
            assert process.stdout is not None
            said = process.stdout.readline()
            if said.startswith("done"):
                process.wait(10)
                process.stdout.close()
                assert at > 6
                assert seen == {"old", "new"}
                assert rig.tree() == new
                return
            assert said == "paused\n", said
            if victim == "client":
                process.send_signal(signal.SIGKILL)
            else:
                rig.sshd.drop_connections()
            process.wait(60)
            process.stdout.close()
            history = settled(rig)
            tree = rig.tree()
            assert tree in (old, new), at
            seen.add("old" if tree == old else "new")
            assert (history["release"] == 0) == (tree == base)
            if tree == new:
                back = ["rollback", "--to", "base"] if operation == "push" else ["rollback", "--to", "v3"]
                assert rig.host(*back)["status"] == "rolled_back"
        pytest.fail("the transaction never came to its end")
