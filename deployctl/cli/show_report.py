"""`report`: the hosts asked, the page made, written and opened."""

import datetime as dt
import sys
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deployctl import __version__
from deployctl.cli.session import Session
from deployctl.domain.dossier import parse_wanted
from deployctl.domain.report import HostReport, Report
from deployctl.errors import Interrupted, UsageError
from deployctl.render import report as page
from deployctl.render.report.model import build
from deployctl.render.terminal import neutral, out, say, size
from deployctl.workflows import report as workflow


def show(session: Session, output: Path, attempts: str | None, *, force: bool, opened: bool) -> None:
    """Run the workflow, write the page and say where it is."""
    if str(output) == "-":
        raise UsageError("-o names a file, and - is none", hint="-o report.html")
    wanted = parse_wanted(attempts) if attempts is not None else None
    workflow.check_target(output, page.MARK, force=force)
    report, dossiers = workflow.gather(session.run(), session.hosts, wanted)
    if report.interrupted:
        raise Interrupted("interrupted: no report was written")
    if not dossiers:
        # A report of nothing would take the place of one that says something.
        session.finish(report)
        return
    failures = {host.name: _failure(host) for host in report.hosts if host.name not in dossiers}
    command = " ".join(["deployctl", *sys.argv[1:]]) if sys.argv[1:2] == ["report"] else "deployctl report"
    model = build(dossiers, failures, at=dt.datetime.now(dt.UTC), version=__version__, command=command[:300])
    written = workflow.write(output, page.page(model))
    told = replace(report, extra={"file": str(output.resolve()), "bytes": written, "attempts": len(model["attempts"])})
    if session.as_json:
        session.finish(told)
    else:
        _say(session, told, written, output)
    if opened and not webbrowser.open(output.resolve().as_uri()):
        say(f"no browser was found here: open {output.resolve().as_uri()}")


def _failure(host: HostReport) -> dict[str, Any]:
    return {"status": host.status, "exit": host.exit_code, "error": dict(host.error or {})}


def _say(session: Session, report: Report, written: int, output: Path) -> None:
    """The hosts' outcomes in words, then the file."""
    session.finish(replace(report, hosts=tuple(host for host in report.hosts if host.exit_code)))
    session.exit_with(report.exit_code)
    answered: Sequence[HostReport] = [host for host in report.hosts if not host.exit_code]
    for host in answered:
        out(f"{neutral(host.name)}  {_counts(host.fields)}")
        for problem in host.fields["problems"]:
            say(f"warning: {neutral(host.name)}: {neutral(str(problem))}")
    missing = [host.name for host in report.hosts if host.exit_code]
    out(f"{output}  {size(written)}" + (f", without {', '.join(missing)}" if missing else ""))


def _counts(fields: Mapping[str, Any]) -> str:
    named = [("attempts", "attempt"), ("crashes", "crash"), ("benches", "bench"), ("releases", "release")]
    return ", ".join(
        f"{fields[key]} {word if fields[key] == 1 else key}" for key, word in named if fields[key] or key == "attempts"
    )
