"""Ctrl-C always ends a command with 130, also one whose host has nothing to complain of."""

import signal

from rig import Rig


def test_a_follow_ends_with_130(tmp_path):
    """`logs -f` over SSH: what was written is there, the exit code tells of Ctrl-C, the server goes on."""
    with Rig(tmp_path) as rig:
        assert "ready" == rig.host("launch", "--log-tag", "a")["status"]
        process = rig.start("logs", "-f")
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        assert first
        assert 130 == process.returncode
        assert "ready" == rig.host("status")["server"]["state"]
