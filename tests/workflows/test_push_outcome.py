"""A link that broke during a push: what is said of its outcome is what the host knows, and no more."""

import fcntl
import json
import os
import sys
import threading
from pathlib import Path

import pytest

from deployctl.domain.inventory import Host, Inventory
from deployctl.errors import LinkLost
from deployctl.workflows.push import _ask_outcome
from deployctl.workflows.run import Run

LOST = LinkLost("the connection to box broke")


class Bench:
    """A host whose lock this process holds, as an agent at work on the transaction would."""

    def __init__(self, root: Path) -> None:
        state = root / "state"
        state.mkdir(mode=0o700)
        self.host = Host(name="box", address="box", connection="local", python=sys.executable, state_dir=str(state))
        self.said: list[str] = []
        self.heard = threading.Event()
        inventory = Inventory(path=root, hosts={"box": self.host}, groups={}, profiles={}, defaults=self.host)
        self.run = Run(inventory, command="push", on_event=self._hear, who="ann@example.org")
        self._lock = os.open(state / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.write(self._lock, json.dumps({"transaction": "t1", "operator": "ann@example.org"}).encode())

    def _hear(self, _host: str, event) -> None:
        if event["event"] == "link":
            self.said.append(event["text"])
            self.heard.set()

    def end(self) -> None:
        os.close(self._lock)


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def test_a_push_that_still_runs_is_not_called_undone(bench):
    """Past the bound: unknown (exit 3), with what is known and the command that tells; nothing of 'not committed'."""
    with pytest.raises(LinkLost) as caught:
        _ask_outcome(bench.run, "push", bench.host, "t1", LOST, for_s=0.5)
    bench.end()
    assert (3, "link-lost") == (caught.value.exit_code, caught.value.kind)
    assert caught.value.message == (
        "the connection to box broke; what became of the push is not known, since it still runs there"
    )
    assert "deployctl status --host box" in caught.value.hint


def test_it_is_asked_on_until_the_push_has_ended(bench, monkeypatch):
    """Round after round while it runs, which is said; then the answer is the host's."""
    monkeypatch.setattr("deployctl.workflows.push._OUTCOME_ROUND_S", 0.2)
    ending = threading.Thread(target=lambda: (bench.heard.wait(60), bench.end()))
    ending.start()
    report = _ask_outcome(bench.run, "push", bench.host, "t1", LOST)
    ending.join(60)
    assert "the push still runs there: waiting for its end" in bench.said
    assert (1, "restored") == (report.exit_code, report.status)
    assert "the push was not committed and the host is as before" in report.error["message"]


def test_a_host_that_cannot_tell_says_why(bench, tmp_path):
    """A damaged state is reported as the host reports it (exit 8), not as 'the host is as before'."""
    bench.end()
    (tmp_path / "state" / "current.json").write_text("{")
    report = _ask_outcome(bench.run, "push", bench.host, "t1", LOST)
    assert 8 == report.exit_code
    assert "current.json" in report.error["message"]
