"""Many hosts at once: those of one push wait for each other, and an undo after Ctrl-C goes on to its end."""

import threading
from pathlib import Path

import pytest
from support import Box, threshold

from deployctl.domain.inventory import Host, Inventory
from deployctl.domain.patch import Patch, parse_metadata
from deployctl.domain.report import HostReport, Report
from deployctl.workflows import push as pushing
from deployctl.workflows.run import Run

DEADLINE_S = 60


def run_over(root: Path, hosts: list[Host], **options) -> Run:
    by_name = {host.name: host for host in hosts}
    inventory = Inventory(path=root, hosts=by_name, groups={}, profiles={}, defaults=hosts[0])
    return Run(inventory, command="push", who="ann@example.org", **options)


def test_all_hosts_of_a_command_are_at_work_at_once(tmp_path):
    """Each of 200 waits for all others, as those of an all-or-none push do; nobody is left out of the meeting."""
    hosts = [Host(name=f"h{number}", address=f"h{number}") for number in range(200)]
    meeting = threading.Barrier(len(hosts), timeout=DEADLINE_S)

    def act(host: Host) -> HostReport:
        meeting.wait()
        return HostReport(name=host.name, status="ok")

    report = run_over(tmp_path, hosts).each(hosts, act)
    assert [host.name for host in hosts] == [outcome.name for outcome in report.hosts]
    assert {0} == {outcome.exit_code for outcome in report.hosts}


def test_only_so_many_connections_are_made_at_once(tmp_path):
    """However many hosts: the client does not dial them all in one moment."""
    hosts = [Host(name=f"h{number}", address=f"h{number}") for number in range(200)]
    guard, dialling, most = threading.Lock(), 0, 0
    crowded = threading.Event()

    class Dialled:
        def __enter__(self):
            nonlocal dialling, most
            with guard:
                dialling += 1
                most = max(most, dialling)
                if dialling >= 64:
                    crowded.set()
            assert crowded.wait(DEADLINE_S)  # the first ones dial until as many as may are at it
            with guard:
                dialling -= 1
            return self

        def __exit__(self, *_):
            pass

    run = run_over(tmp_path, hosts, connect=lambda _host: Dialled())

    def act(host: Host) -> HostReport:
        with run._connected(host):
            return HostReport(name=host.name, status="ok")

    assert 0 == run.each(hosts, act).exit_code
    assert 64 == most


@pytest.fixture
def pair(tmp_path):
    """Two real hosts on this machine, each with a package of its own at the base."""
    boxes = [Box(tmp_path / name) for name in ("one", "two")]
    hosts = [
        Host(
            name=box.root.name,
            address=box.root.name,
            connection="local",
            python=str(box.python),
            package="fakesgl",
            state_dir=str(box.root / "state"),
        )
        for box in boxes
    ]
    return boxes, hosts


def patch_of(script: str) -> Patch:
    metadata = parse_metadata(script, "a/v1", "script")
    return Patch(
        series="a", version="v1", kind="script", path=Path("v1.py"), content=script.encode(), metadata=metadata
    )


def test_hosts_that_had_committed_are_taken_back_after_ctrl_c(pair, tmp_path):
    """Ctrl-C has been pressed, and one of two had committed by then: the rollback on it is not cancelled by that."""
    boxes, hosts = pair
    run = run_over(tmp_path, hosts)
    before = boxes[0].tree()
    done = pushing.push(run, patch_of(threshold(5)), hosts[:1])
    assert ("pushed", 0) == (done.hosts[0].status, done.exit_code)
    run.interrupt()
    failed = HostReport(name="two", status="restored", exit_code=130, error={"kind": "interrupted", "message": "x"})
    report = pushing._undo_committed(run, Report(command="push", hosts=(done.hosts[0], failed)), hosts)
    assert ["restored", "restored"] == [outcome.status for outcome in report.hosts]
    assert "taken back to release 0" in report.hosts[0].error["message"]
    assert before == boxes[0].tree()


@pytest.mark.parametrize("operation", ["push", "rollback"])
def test_what_the_journal_says_was_committed_can_be_taken_back(pair, tmp_path, operation):
    """The link broke behind the commit: the outcome names the release before, so that the other hosts' failure takes
    this one back, too, whichever way it went."""
    boxes, hosts = pair
    run = run_over(tmp_path, hosts)
    pushing.push(run, patch_of(threshold(5)), hosts[:1])
    before = boxes[0].tree()
    if operation == "push":
        boxes[0].host.update(state_dir=hosts[0].state_dir)
        assert "pushed" == boxes[0].push("a/v2", threshold(6), transaction="cut")["status"]
    else:
        boxes[0].host.update(state_dir=hosts[0].state_dir)
        assert "rolled_back" == boxes[0].ask("rollback", transaction="cut")["status"]
    assert before != boxes[0].tree()
    outcome = pushing._ask_outcome(run, operation, hosts[0], "cut", pushing.LinkLost("the link broke"))
    assert 1 == outcome.fields["previous"]
    failed = HostReport(name="two", status="failed", exit_code=1, error={"kind": "failed", "message": "x"})
    report = pushing._undo_committed(run, Report(command=operation, hosts=(outcome, failed)), hosts)
    assert "taken back to release 1" in report.hosts[0].error["message"]
    assert before == boxes[0].tree()
