"""push and rollback over one or several hosts: all prepare, then all commit; one failure restores all."""

import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from deployctl.domain.inventory import Host
from deployctl.domain.patch import Patch
from deployctl.domain.report import HostReport, Report
from deployctl.errors import DeployError, LinkLost, Unreachable
from deployctl.remote.client import Exchange
from deployctl.workflows.run import Run

_DONE = ("pushed", "rolled_back")
# A transaction that lost its client ends by itself; only a program that cannot be ended (state D) keeps it.
_OUTCOME_PATIENCE_S = 300.0
_OUTCOME_ROUND_S = 30.0


class _Meeting:
    """Where hosts wait for each other before the commit.

    Every host arrives once: prepared, or finished without (failed, unchanged, another name of the same machine).
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._missing = set(names)
        self._failed: dict[str, str] = {}
        self._changed = threading.Condition()

    def arrive(self, name: str, failure: str = "") -> None:
        """Tell that a host is ready, or has failed for a reason."""
        with self._changed:
            self._missing.discard(name)
            if failure:
                self._failed.setdefault(name, failure)
            self._changed.notify_all()

    def decide(self, interrupted: threading.Event) -> str:
        """Wait for everybody; the empty string means commit, anything else is the reason not to."""
        with self._changed:
            while self._missing and not self._failed and not interrupted.is_set():
                self._changed.wait(0.2)
            if interrupted.is_set():
                return "interrupted"
            return "; ".join(f"{name}: {reason}" for name, reason in self._failed.items())


def push(
    run: Run,
    patch: Patch,
    hosts: Sequence[Host],
    *,
    imports: Sequence[str] = (),
    dry_run: bool = False,
    force: bool = False,
    adopt: bool = False,
    independent: bool = False,
) -> Report:
    """Move every host to its base and stack with the patch; see the contract's section 5."""
    args = {
        "patch": patch.as_request(),
        "imports": list(imports),
        "dry_run": dry_run,
        "force": force,
        "adopt": adopt,
    }
    return _transact(run, "push", hosts, args, {"patch": patch.content}, together=not (independent or dry_run))


def rollback(
    run: Run,
    hosts: Sequence[Host],
    *,
    to: str | int | None = None,
    imports: Sequence[str] = (),
    dry_run: bool = False,
    force: bool = False,
    independent: bool = False,
) -> Report:
    """Move every host back to an older release."""
    args = {"to": to, "imports": list(imports), "dry_run": dry_run, "force": force}
    return _transact(run, "rollback", hosts, args, {}, together=not (independent or dry_run))


def _transact(
    run: Run,
    operation: str,
    hosts: Sequence[Host],
    args: Mapping[str, Any],
    blobs: Mapping[str, bytes],
    *,
    together: bool,
) -> Report:
    together = together and len(hosts) > 1
    meeting = _Meeting([host.name for host in hosts]) if together else None

    def one(host: Host) -> HostReport:
        transaction = secrets.token_hex(8)
        asked = dict(args, transaction=transaction, hold=together)
        failure = "could not be asked"
        try:
            report = _one_host(run, operation, host, asked, blobs, meeting)
            failure = "" if report.exit_code == 0 or _is_alias(report) else str((report.error or {}).get("message"))
            return report
        except DeployError as error:
            failure = error.message
            raise
        finally:
            if meeting is not None:
                meeting.arrive(host.name, failure.splitlines()[0] if failure else "")

    report = run.each(hosts, one, command=operation)
    if together and any(outcome.exit_code for outcome in report.hosts):
        report = run.named(_undo_committed(run, report, hosts), hosts)
    return report


def _is_alias(report: HostReport) -> bool:
    return bool(report.error and report.error.get("kind") == "alias")


def _one_host(
    run: Run,
    operation: str,
    host: Host,
    args: Mapping[str, Any],
    blobs: Mapping[str, bytes],
    meeting: _Meeting | None,
) -> HostReport:
    def on_event(event: Mapping[str, Any], exchange: Exchange) -> None:
        if event["event"] == "prepared" and meeting is not None:
            meeting.arrive(host.name)
            reason = meeting.decide(run.interrupted)
            if reason:
                exchange.control("abort", reason=f"not committed, because of another host: {reason}")
            else:
                exchange.control("commit")

    try:
        result = run.ask(host, operation, args, blobs=blobs, on_event=on_event)
    except LinkLost as lost:
        return _ask_outcome(run, operation, host, str(args["transaction"]), lost)
    return HostReport.from_result(host.name, result)


def _ask_outcome(
    run: Run, operation: str, host: Host, transaction: str, lost: LinkLost, *, for_s: float = _OUTCOME_PATIENCE_S
) -> HostReport:
    """An apply is never retried: the journal tells what became of it.

    Args:
        run, operation, host, transaction: What was asked, and where.
        lost: How the link broke.
        for_s: How long to ask on while the transaction still runs there, in seconds.

    Raises:
        LinkLost: What became of it is not known: the host cannot be reached, or the transaction runs on.
    """
    end = time.monotonic() + for_s

    def unknown(why: str) -> LinkLost:
        return LinkLost(
            f"{lost.message}; what became of the {operation} is not known, since {why}",
            hint=f"deployctl status --host {host.name}: the tree is at the release before or after, never between",
        )

    try:
        while True:
            round_s = min(max(0.0, end - time.monotonic()), _OUTCOME_ROUND_S)
            answer = run.ask_patiently(host, "outcome", {"transaction": transaction, "timeout_s": round_s})
            if answer.get("outcome") != "in-progress" or time.monotonic() >= end or run.interrupted.is_set():
                break
            run.on_event(host.name, {"event": "link", "text": f"the {operation} still runs there: waiting for its end"})
        committed = answer.get("outcome") == "committed"
        history = run.ask_patiently(host, "history").get("releases") or [] if committed else []
    except Unreachable as error:
        raise unknown(f"the host cannot be reached: {error.message}") from error
    if answer["exit"] != 0:
        return HostReport.from_result(host.name, answer)  # such as a recovery that failed
    if answer["outcome"] == "in-progress":
        raise unknown("it still runs there") from lost
    fields = {"release": answer["release"], "transaction": transaction}
    if committed:
        made = next((entry for entry in history if entry["release"] == answer["release"]), None)
        fields["patches"] = made["patches"] if made else []
        if answer.get("previous") is not None:
            fields["previous"] = answer["previous"]
        fields["warnings"] = [f"the link broke ({lost.message}), but the {operation} had been committed"]
        return HostReport(name=host.name, status="pushed" if operation == "push" else "rolled_back", fields=fields)
    problem = {
        "kind": "link-lost",
        "message": f"{lost.message}; the {operation} was not committed and the host is as before",
        "hint": "the same command again",
    }
    return HostReport(name=host.name, status="restored", exit_code=1, error=problem, fields=fields)


def _undo_committed(run: Run, report: Report, hosts: Sequence[Host]) -> Report:
    """A host failed after others had committed (its link broke in that very moment): take those back."""
    by_name = {host.name: host for host in hosts}
    settled = []
    for outcome in report.hosts:
        if outcome.status not in _DONE or "alias_of" in outcome.fields or "previous" not in outcome.fields:
            settled.append(outcome)
            continue
        try:
            args = {"to": outcome.fields["previous"], "transaction": secrets.token_hex(8)}
            back = run.ask(by_name[outcome.name], "rollback", args, undoing=True)
        except DeployError as error:
            settled.append(HostReport.from_error(outcome.name, error, release=outcome.fields.get("release")))
            continue
        if back["exit"] != 0:
            settled.append(HostReport.from_result(outcome.name, back))
            continue
        message = {
            "kind": "aborted",
            "message": f"taken back to release {back['release']}, because another host failed",
            "hint": "mend the host that failed, or use --independent",
        }
        fields = {**outcome.fields, "release": back["release"], "patches": back["patches"]}
        settled.append(HostReport(name=outcome.name, status="restored", exit_code=1, error=message, fields=fields))
    return replace(report, hosts=tuple(settled))
