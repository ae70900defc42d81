"""Launch arguments, log tags and reports."""

from dataclasses import replace
from pathlib import Path

import pytest

from deployctl.domain import attempt, hosts_yaml, inventory
from deployctl.domain.report import HostReport, Report
from deployctl.errors import HostKeyError, Interrupted, UsageError, worst_exit

PROJECT = Path(__file__).resolve().parents[2]
SHIPPED = hosts_yaml.load(PROJECT / "hosts.yaml")


@pytest.mark.parametrize("tag", ["t5_v3", "a", "A.b-c_9", "x" * 64])
def test_log_tags(tag):
    """What can name a file on any system."""
    assert attempt.check_log_tag(tag) == tag


@pytest.mark.parametrize("tag", ["", ".a", "-a", "a/b", "a b", "x" * 65, "é", "a\n"])
def test_log_tags_that_are_refused(tag):
    """Everything else, before connecting."""
    with pytest.raises(UsageError, match="cannot name a log"):
        attempt.check_log_tag(tag)


def test_launch_arguments():
    """The profile, what stands after --, and the flags."""
    profile = SHIPPED.profile("eagle3")
    args = attempt.launch_args(profile, log_tag="t", extra=["--port", "31000"], burst=4, timeout_s=5, clean="none")
    assert args["argv"][-2:] == ["--port", "31000"]
    assert args["port"] == 31000
    assert args["ready"] == {"url": "http://127.0.0.1:31000/health", "timeout_s": 5}
    assert (args["smoke"], args["burst"], args["clean"], args["watch"]) == (True, 4, "none", "ready")
    plain = attempt.launch_args(replace(profile, smoke=None), log_tag="t")
    assert (plain["port"], plain["smoke_spec"], plain["timeout_s"]) == (30000, None, 900)


def test_ranks():
    """Each rank gets its number; the address of rank 0 unless the profile names one."""
    profile = replace(SHIPPED.profile("eagle3"), nodes=2)
    hosts = [inventory.Host(name="a", address="10.0.0.1"), inventory.Host(name="b", address="10.0.0.2")]
    second = attempt.launch_args(profile, log_tag="t", rank=1, hosts=hosts)
    assert second["argv"][-6:] == ["--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "10.0.0.1:20000"]
    assert (second["watch"], second["smoke"]) == ("alive", False)
    named = replace(profile, argv=(*profile.argv, "--dist-init-addr=x:1"))
    assert attempt.launch_args(named, log_tag="t", hosts=hosts)["argv"][-4:] == ["--nnodes", "2", "--node-rank", "0"]
    with pytest.raises(UsageError, match="needs 2 hosts, 1 are selected"):
        attempt.launch_args(profile, log_tag="t", hosts=hosts[:1])


def test_relaunch_tags_and_command_differences():
    """The first free -r<N>; what a command line lost and gained."""
    assert attempt.relaunch_tag("t", ["t"]) == "t-r1"
    assert attempt.relaunch_tag("t-r1", ["t", "t-r1"]) == "t-r2"
    gone, new = attempt.command_difference({"argv": ["/py", "-m", "a", "--x"]}, ["{python}", "-m", "a", "--y"])
    assert (gone, new) == (["/py", "--x"], ["--y"])


def test_reports():
    """One object per host; the worst decides."""
    good = HostReport.from_result("a", {"status": "pushed", "exit": 0, "error": None, "release": 1})
    bad = HostReport.from_error("b", HostKeyError("m", hint="h"), release=2)
    gone = HostReport.from_error("c", Interrupted("i"))
    odd = HostReport.from_error("d", UsageError("u"))
    assert good.as_json() == {"status": "pushed", "exit": 0, "release": 1, "error": None}
    error = {"kind": "host-key", "message": "m", "hint": "h"}
    assert bad.as_json() == {"status": "unreachable", "exit": 3, "release": 2, "error": error}
    assert (gone.status, odd.status) == ("interrupted", "failed")
    report = Report(command="push", hosts=(good, bad))
    assert report.as_json()["ok"] is False
    assert list(report.as_json()["hosts"]) == ["a", "b"]
    assert Report(command="push", hosts=(bad, gone)).exit_code == 130


def test_the_worst_exit_code():
    """In the contract's order: 8, 3, 1, 6, 7, 5, 10, 9, 4, 2; 130 wins, unknown codes count."""
    order = [130, 8, 3, 1, 6, 7, 5, 10, 9, 4, 2]
    for position, code in enumerate(order):
        assert worst_exit([0, *order[position:]]) == code
    assert worst_exit([]) == 0
    assert worst_exit([0, 77]) == 77


def test_ctrl_c_decides_whatever_the_hosts_say():
    """A command that was interrupted is not ok, although every host is."""
    report = Report(command="logs", hosts=(HostReport(name="a", status="ok"),))
    assert (0, True) == (report.exit_code, report.as_json()["ok"])
    interrupted = replace(report, interrupted=True)
    assert (130, False) == (interrupted.exit_code, interrupted.as_json()["ok"])
