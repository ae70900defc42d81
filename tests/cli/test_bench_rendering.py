"""A bench as text: a table that says what is not known, and nothing of a host's that a terminal would obey."""

import sys

import pytest

from deployctl.domain.report import HostReport, Report
from deployctl.render import bench, text
from deployctl.render.progress import Progress

ESCAPE = "\x1b]0;owned\x07\x1b[2J"
SPREAD = {"mean": 1.0, "p50": 12.345, "p90": 2.0, "p99": 1234.5}


def level(concurrency, completed, **changes):
    value = {"concurrency": concurrency, "sent": 16, "completed": completed, "errors": [], "state": "done"}
    return {**value, "output_tok_per_s": 1773.4, "ttft_ms": SPREAD, "problem": None, **changes}


def record(*levels, **changes):
    value = {
        "bench": 2,
        "attempt": 7,
        "log_tag": "t5",
        "started": "2026-01-31T12:00:00Z",
        "state": "failed",
        "generator": {"name": "sglang.bench_serving", "version": None},
        "load": {"levels": [1, 2, 4], "prompts": {"name": "coding", "count": 64}, "max_tokens": 256, "seed": 1},
        "levels": list(levels),
        "warnings": ["slow disk"],
    }
    return {**value, **changes}


def test_the_table_tells_what_failed_and_what_is_missing():
    """Unknown is `-` and never 0; a level that failed says so, with its errors; levels that were not tried are named."""
    good = level(1, 16, accept_length=2.5)
    bad = level(2, 14, errors=["ConnectionResetError: cut"], problem="2 of 16 requests failed", output_tok_per_s=None)
    shown = bench.lines(record(good, bad))
    assert "bench 2 of attempt 7 (t5): sglang.bench_serving, prompts coding (64), 256 tokens each, seed 1" in shown[0]
    assert ["1", "1773", "-", "12.3", "1234", "-", "-", "2.50", "16/16"] == shown[2].split()
    assert ["2", "-", "-", "12.3", "1234", "-", "-", "-", "14/16", "FAILED"] == shown[3].split()
    assert "  C=2: ConnectionResetError: cut" in shown
    assert "  not measured: 4" in shown
    assert "  warning: slow disk" in shown
    assert "C=1: 1773.4 tok/s" not in bench.said(bad)
    assert "C=2: 2 of 16 requests failed" == bench.said(bad)
    assert "C=1: 1773 tok/s, TTFT 12.3 ms, TPOT - ms, accept length 2.50" == bench.said(good)


def test_no_text_of_a_host_is_obeyed(monkeypatch, capsys):
    """Errors, warnings, tags and problems may hold anything."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    hostile = level(1, 3, errors=[ESCAPE], problem=ESCAPE, state="failed")
    value = record(hostile, log_tag=ESCAPE, warnings=[ESCAPE], generator={"name": ESCAPE, "version": ESCAPE})
    error = {"kind": "bench", "message": ESCAPE, "hint": ESCAPE}
    host = HostReport(name="h", status="failed", exit_code=7, error=error, fields={"bench": value})
    text.report(Report(command="bench", hosts=(host,)))
    progress = Progress(several=False, verbose=False)
    progress("h", {"event": "bench", "bench": 1, "attempt": 1, "log_tag": ESCAPE, "levels": [1], "done": []})
    progress("h", {"event": "level", **hostile})
    progress.close()
    out, err = capsys.readouterr()
    assert "\x1b]" not in out + err
    assert "\x1b[2J" not in out + err
    assert "\\x1b]0;owned" in out
    assert "\\x1b]0;owned" in err


@pytest.mark.parametrize(
    ("events", "fraction", "words"),
    [
        ([], 0.0, "getting ready"),
        ([{"state": "start", "completed": 0}], 0.0, "C=2  0/16  level 2 of 3"),
        ([{"state": "progress", "completed": 4}], 0.25, "C=2  4/16  level 2 of 3"),
        ([{"state": "done", "completed": 16}], 1.0, "C=2  16/16  level 2 of 3"),
    ],
)
def test_what_the_bar_shows(events, fraction, words):
    """The level that runs, how far it is, and which of how many it is: those that were there before count."""
    sweep = bench.Sweep([1, 2, 4], [1])
    for event in events:
        sweep.level({"concurrency": 2, "sent": 16, **event})
    assert fraction == sweep.fraction()
    assert words in sweep.describe()
