"""Measures servers: asks each host for a bench, through broken links, and joins it to a launch."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from deployctl.domain.bench import BenchRequest
from deployctl.domain.inventory import Host
from deployctl.domain.report import HostReport, Report
from deployctl.errors import EXIT_OK, Interrupted, UsageError
from deployctl.remote.client import Exchange
from deployctl.workflows.run import Run
from deployctl.workflows.serve import through_outages


def bench(
    run: Run,
    hosts: Sequence[Host],
    request: BenchRequest,
    *,
    attempt: int | None = None,
    log_tag: str | None = None,
) -> Report:
    """Measure the server of every host, all at once.

    Args:
        run: The run.
        hosts: Each measures its own server.
        request: Levels and load.
        attempt, log_tag: Which server; by default the newest that lives.

    Raises:
        UsageError: Both an attempt and a tag were named.
    """
    if attempt is not None and log_tag is not None:
        raise UsageError("--attempt and --log-tag name the server twice", hint="name one of them")
    which = {"attempt": attempt, "log_tag": log_tag}
    return without_ranks(run.each(hosts, lambda host: _bench_one(run, host, request, which), command="bench"))


def without_ranks(report: Report) -> Report:
    """A report in which ranks that serve nothing of their own are no failures, where their rank 0 was measured."""

    def is_rank(host: HostReport) -> bool:
        return bool(host.error) and (host.error or {}).get("kind") == "not-rank-0"

    if all(is_rank(host) for host in report.hosts):
        return report
    hosts = [
        replace(host, status="rank", exit_code=EXIT_OK, error=None) if is_rank(host) else host for host in report.hosts
    ]
    return replace(report, hosts=tuple(hosts))


def _bench_one(run: Run, host: Host, request: BenchRequest, which: Mapping[str, Any]) -> HostReport:
    """One host: after a broken link the bench goes on with the levels that are missing."""
    args = {
        **request.as_request(),
        **which,
        "resume": None,
        "token": secrets.token_hex(8),  # by which a bench is known that a broken link kept us from hearing of
        "pythons": {p.name: p.bench_python for p in run.inventory.profiles.values() if p.bench_python},
    }

    def watch(event: Mapping[str, Any], _exchange: Exchange) -> None:
        if event["event"] == "bench":
            # From now on this very bench is meant, whatever else becomes the newest attempt.
            args.update(attempt=event["attempt"], log_tag=None, resume=event["bench"])

    def ask() -> dict[str, Any]:
        return run.ask(host, "bench", args, blobs={"prompts": request.prompts.content}, on_event=watch)

    text = "trying again; the levels so far are kept"
    return HostReport.from_result(host.name, through_outages(run, host, ask, text, _given_up))


def _given_up() -> Interrupted:
    return Interrupted(
        "interrupted while the link was down: the host ends the bench by itself, the levels so far are kept",
        hint="deployctl bench measures anew",
    )


def after_launch(run: Run, hosts: Sequence[Host], launched: Report, request: BenchRequest, *, nodes: int = 1) -> Report:
    """A launch's report with the bench of every server that came up; the worse of both decides the exit.

    Of a server over several nodes the first rank alone is measured.
    """
    ready = [
        (host, report)
        for host, report in list(zip(hosts, launched.hosts, strict=True))[: 1 if nodes > 1 else None]
        if report.exit_code == 0 and report.status == "ready"
    ]
    if not ready or run.interrupted.is_set():
        return launched
    numbers = {host.name: report.fields["attempt"] for host, report in ready}
    measured = run.each(
        [host for host, _ in ready],
        lambda host: _bench_one(run, host, request, {"attempt": numbers[host.name], "log_tag": None}),
        command="bench",
    )
    by_name = {report.name: report for report in measured.hosts}
    joined = [_joined(report, by_name.get(report.name)) for report in launched.hosts]
    return replace(launched, hosts=tuple(joined))


def _joined(launched: HostReport, measured: HostReport | None) -> HostReport:
    if measured is None:
        return launched
    fields = {**launched.fields, "bench": measured.fields.get("bench")}
    if measured.exit_code == 0:
        return replace(launched, fields=fields)
    fields["crash"] = measured.fields.get("crash") or launched.fields.get("crash")
    # `ready` was true of the launch; what the bench found is what stands now.
    status = "crashed" if measured.status == "crashed" else launched.status
    return replace(launched, status=status, exit_code=measured.exit_code, error=measured.error, fields=fields)
