"""`report`: the hosts asked, the page made, written and opened."""

import datetime as dt
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deployctl import __version__
from deployctl.cli.session import Session
from deployctl.domain.dossier import parse_wanted
from deployctl.domain.report import HostReport
from deployctl.errors import Interrupted, UsageError
from deployctl.render import report as page
from deployctl.render.report.model import build
from deployctl.render.terminal import out, say, size
from deployctl.workflows import report as workflow


def show(
    session: Session, output: Path, attempts: str | None, hosts: Sequence[str], *, force: bool, opened: bool
) -> None:
    """Run the workflow, write the page and say where it is."""
    if str(output) == "-":
        raise UsageError("-o names a file, and - is none", hint="-o report.html")
    wanted = parse_wanted(attempts) if attempts is not None else None
    workflow.check_target(output, page.MARK, force=force)
    asked = workflow.hosts_of(session.inventory, wanted, hosts)
    report, dossiers = workflow.gather(session.run(asked), asked, wanted)
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
    told = replace(report, extra={"file": str(output.absolute()), "bytes": written, "attempts": len(model["attempts"])})
    session.finish(told)
    if not session.as_json:
        without = f", without {', '.join(failures)}" if failures else ""
        out(f"{output}  {size(written)}{without}")
    if opened and not webbrowser.open(output.absolute().as_uri()):
        say(f"no browser was found here: open {output.absolute().as_uri()}")


def _failure(host: HostReport) -> dict[str, Any]:
    return {"status": host.status, "exit": host.exit_code, "error": dict(host.error or {})}
