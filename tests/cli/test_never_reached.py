"""A host that was never reached is unreachable (exit 3) for every command, after the tries of one connection."""

import pytest
from rig import Rig
from sshd_rig import free_port


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    with Rig(tmp_path_factory.mktemp("rig")) as rig:
        yield rig


@pytest.mark.parametrize(
    "words",
    [
        ("wait",),
        ("smoke",),
        ("status",),
        ("history",),
        ("doctor",),
        ("logs", "--list"),
        ("bench",),
        ("stop",),
        ("launch", "--log-tag", "a"),
    ],
)
def test_a_port_that_refuses_is_no_outage(rig, words):
    """Only a link that was there can break and be waited for; a refusal from the start ends with 3 and a hint."""
    done = rig.run(*words, "--json", "--host", f"root@127.0.0.1:{free_port()}")
    assert done.returncode == 3, done.stderr
    assert "trying again" not in done.stderr
