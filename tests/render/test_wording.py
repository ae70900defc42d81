"""What people read is English: one file is no "1 files", a status has no underscore, and nothing is said twice."""

import re
from pathlib import Path

import pytest

from deployctl.domain.report import HostReport, Report
from deployctl.render import text
from deployctl.render.progress import Progress

SOURCES = Path(__file__).resolve().parents[2] / "deployctl"
# Every status and every state of an attempt that the source can report: literals beside `status`, and the constants.
STATUSES = sorted(
    {
        word
        for path in [*SOURCES.glob("agent/*.py"), *SOURCES.glob("workflows/*.py")]
        for line in path.read_text().splitlines()
        if re.search(r"status|carry_out|^[A-Z_, ]+ = \"", line)
        for word in re.findall(r"\"([a-z]{3,}(?:[_-][a-z]+)*)\"", line)
    }
)
PROCESS = {"pid": 7, "user": "root", "command": "python", "age_s": 1, "attempt": 1}
ATTEMPT = {
    "attempt": 1,
    "log_tag": "t",
    "profile": "p",
    "release": 1,
    "state": "smoke_failed",
    "ready_seconds": 1.0,
    "at": 0.0,
    "cause": None,
    "log": "/l",
    "log_bytes": 1,
}


def of_everything(count: int) -> dict:
    """Fields of every command at once, each list with `count` entries."""
    release = {"release": 1, "patches": ["a/v1"], "version": "1", "files": count, "at": 0.0, "by": "ann"}
    drift = [{"path": f"f{number}.py", "expected": "a", "found": "b", "base": "b"} for number in range(count)]
    return {
        "release": 1,
        "patches": ["a/v1"],
        "package_dir": "/p",
        "version": "1",
        "drift": drift,
        "drift_summary": "",
        "releases": [{**release, "current": True, "other_base": False}] * count,
        "attempts": [ATTEMPT] * count,
        "server": None,
        "attempt": ATTEMPT,
        "orphans": [PROCESS] * count,
        "holders": [PROCESS] * count,
        "gpus": [{"index": 0, "name": "H200", "used_mib": 5, "total_mib": 10}] * count,
        "stopped": [{"attempt": 1, "log_tag": "t", "ended": [PROCESS] * count, "note": ""}] * count,
        "ended": [PROCESS] * count,
        "kept": [PROCESS] * count,
        "spared": [PROCESS] * count,
        "shm_removed": [f"psm_{number}" for number in range(count)],
        "devices": ["/dev/nvidia0"] * count,
        "tools": {"nvidia-smi": "nvidia-smi is not installed", "fuser": "ok"},
        "checks": [],
        "entries": [],
    }


def rendered(command: str, capsys, status: str = "ok", **fields) -> str:
    text.report(Report(command=command, hosts=(HostReport(name="h", status=status, fields=fields),)))
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["push", "rollback", "status", "history", "stop", "clean", "lock", "doctor"])
def test_one_is_not_many(command, capsys):
    """Counts of one and of two, in every renderer: `1 file`, `2 files`."""
    fields = of_everything(1)
    if command in ("push", "rollback"):
        fields.update(files=[])
    shown = rendered(command, capsys, **fields)
    assert [] == re.findall(r"\b1 (?!process\b)[a-z]{3,}s\b|\((?:e?s)\)", shown), shown
    two = rendered(command, capsys, **{**of_everything(2), "files": []})
    assert [] == re.findall(r"\b2 (?:file|process|orphan|leftover)\b", two), two


@pytest.mark.parametrize("command", ["push", "rollback", "launch", "wait", "smoke", "stop", "clean", "lock", "play"])
def test_statuses_are_words(command, capsys):
    """Whatever the agent or a workflow can answer is shown without underscores; `--json` keeps them."""
    assert {"rolled_back", "smoke_failed", "nothing-running"} <= set(STATUSES)
    for status in STATUSES:
        shown = rendered(command, capsys, status=status)
        assert re.search(rf"^{re.sub('[_-]', ' ', status)}\b", shown), (status, shown)
    listing = text.logs_listing(HostReport(name="h", status="ok", fields={"attempts": [ATTEMPT]}))
    assert "smoke failed" in listing[1]


def test_leftovers_in_shared_memory_are_shown(capsys):
    """`clean` removed them: it says how many and which."""
    fields = {"shm_removed": [f"psm_{number}" for number in range(7)]}
    assert (
        "  7 leftovers of dead servers removed from shared memory: psm_0, psm_1, psm_2, psm_3, psm_4 and 2 more"
        in rendered("clean", capsys, status="clean", **fields).splitlines()
    )


def test_unverified_memory_is_said_once(capsys):
    """launch says it in one line, clean in its error; the list of tools does not repeat it."""
    missing = "nvidia-smi is not installed"
    tools = {"nvidia-smi": missing, "fuser": "fuser is not installed: only /proc was read"}
    cleaned = {"devices": ["/dev/nvidia0"], "tools": tools, "unverified": missing}
    for command, fields in (("clean", cleaned), ("launch", {"attempt": 1, "log_tag": "t", "clean": cleaned})):
        shown = rendered(command, capsys, **fields)
        assert (command == "launch") == shown.count(missing)
        assert "  fuser is not installed: only /proc was read" in shown.splitlines()


def test_attaching_again_repeats_nothing(capsys):
    """A broken link: the attempt, its log, what earlier loads took and finished phases were shown; new ones are."""
    began = {
        "event": "attempt",
        "attempt": 4,
        "profile": "p",
        "log_tag": "t",
        "release": 1,
        "patches": ["a/v1"],
        "pid": 9,
        "log": "/l",
        "elapsed_s": 1.0,
    }
    expected = {"event": "expect", "ready_seconds": 60.0, "phases": {}}
    first = [{"event": "phase", "state": "done", "name": "init", "seconds": 2.0, "progress": None}]
    again = [{**first[0], "seconds": 2.01}, {**first[0], "name": "weights", "seconds": 5.0}]
    ready = {"event": "ready", "seconds": 9.0}
    progress = Progress(several=False, verbose=False)
    for event in (began, expected, *first, began, expected, *again, began, ready, began, ready):
        progress("h", event)
    told = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in told] == ["attempt", "log", "earlier", "init", "weights", "ready"]
    progress("h", {**began, "attempt": 5})
    progress("h", first[0])
    assert ["attempt", "log", "init"] == [line.split()[0] for line in capsys.readouterr().err.splitlines()]
