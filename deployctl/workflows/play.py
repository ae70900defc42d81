"""Runs a playbook: its steps in order on their hosts, fail-fast, `on_failure` once."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deployctl.domain import patch as patches
from deployctl.domain.compare import parse_names
from deployctl.domain.inventory import Host
from deployctl.domain.playbook import Playbook, Step, bench_request
from deployctl.domain.report import HostReport, Report
from deployctl.errors import EXIT_INTERRUPTED, DeployError, worst_exit
from deployctl.workflows import bench, keep, logs, push, serve
from deployctl.workflows.run import Run


@dataclass(frozen=True, slots=True)
class Played:
    """One step that ran (or was to run): its report, None where it was not reached."""

    step: Step
    report: Report | None
    seconds: float
    cleanup: bool = False


@dataclass(frozen=True, slots=True)
class PlayReport:
    """A playbook's outcome."""

    playbook: Playbook
    played: tuple[Played, ...]

    @property
    def exit_code(self) -> int:
        """Of the first step that failed; a failing `on_failure` shows through recovery trouble alone."""
        codes = [one.report.exit_code for one in self.played if one.report and not one.cleanup]
        return worst_exit(codes)

    def as_json(self) -> dict[str, Any]:
        """The one object of `--json`."""
        hosts: dict[str, Any] = {}
        for one in self.played:
            for host in one.report.hosts if one.report else ():
                entry = hosts.setdefault(host.name, {"status": "ok", "exit": 0, "error": None, "steps": []})
                entry["steps"].append({"step": one.step.name, **host.as_json()})
                if host.exit_code and not entry["exit"] and not one.cleanup:
                    entry.update(status=host.status, exit=host.exit_code, error=host.error)
        return {
            "ok": self.exit_code == 0,
            "command": "play",
            "hosts": hosts,
            "playbook": self.playbook.name,
            "steps": [
                {
                    "step": one.step.title,
                    "line": one.step.line,
                    "on_failure": one.cleanup,
                    "seconds": round(one.seconds, 3),
                    "exit": one.report.exit_code if one.report else None,
                }
                for one in self.played
            ],
        }


def play(
    run: Run,
    playbook: Playbook,
    hosts: Sequence[Host],
    *,
    on_step: Callable[[Step, int, int, bool], None],
    on_report: Callable[[Step, Report], None],
    on_data: logs.OnData,
) -> PlayReport:
    """Run the steps; the first that fails ends them, and `on_failure` runs once.

    Args:
        run: The run.
        playbook: Checked by `playbook.load`.
        hosts: For steps that name none.
        on_step, on_report: Called before and after each step.
        on_data: Log output of `logs` steps.
    """
    played: list[Played] = []
    before: dict[str, int] = {}

    def go(steps: Sequence[Step], *, cleanup: bool) -> bool:
        for number, step in enumerate(steps, 1):
            on_step(step, number, len(steps), cleanup)
            chosen = run.inventory.select(step.hosts) if step.hosts else hosts
            began = time.monotonic()
            if cleanup and step.name == "rollback" and "to" not in step.args:
                report = _take_back(run, step, chosen, before)
            else:
                report = perform(run, step, chosen, on_data)
            if step.name == "push":
                for host in report.hosts:
                    if host.status == "pushed":
                        before.setdefault(host.name, host.fields.get("previous", 0))
            played.append(Played(step, report, time.monotonic() - began, cleanup))
            on_report(step, report)
            if report.exit_code and not cleanup:
                played.extend(Played(rest, None, 0.0) for rest in steps[number:])
                return False
        return True

    if not go(playbook.steps, cleanup=False) and not run.interrupted.is_set():
        go(playbook.on_failure, cleanup=True)
    return PlayReport(playbook, tuple(played))


def _take_back(run: Run, step: Step, hosts: Sequence[Host], before: Mapping[str, int]) -> Report:
    """`rollback: {}` under on_failure: each host goes back to where this playbook found it.

    A host that this playbook did not change stays: a push that failed has been undone already, and one release
    further back would be somebody else's.
    """

    def one(host: Host) -> HostReport:
        if host.name not in before:
            return HostReport(name=host.name, status="unchanged", fields={"warnings": ["nothing of this run to undo"]})
        args = {"to": before[host.name], "force": step.args.get("force", False), "transaction": secrets.token_hex(8)}
        return HostReport.from_result(host.name, run.ask(host, "rollback", args))

    report = run.each(hosts, one, command="rollback")
    changed = [host for host in hosts if host.name in before]
    if step.args.get("relaunch") and report.exit_code == 0 and changed:
        launched = serve.with_rollback(serve.relaunch(run, changed), report)
        by_name = {host.name: host for host in launched.hosts}
        return replace(launched, hosts=tuple(by_name.get(host.name, host) for host in report.hosts))
    return report


def perform(run: Run, step: Step, hosts: Sequence[Host], on_data: logs.OnData) -> Report:
    """Carry out one step."""
    args = dict(step.args)
    match step.name:
        case "push":
            return push.push(
                run,
                patches.load(args["patch"], run.inventory.root),
                hosts,
                imports=args.get("import", ()),
                force=args.get("force", False),
                adopt=args.get("adopt", False),
                independent=args.get("independent", False),
            )
        case "rollback":
            relaunch = args.pop("relaunch", False)
            report = push.rollback(run, hosts, **args)
            if not relaunch or report.exit_code:
                return report
            return serve.with_rollback(serve.relaunch(run, hosts), report)
        case "launch":
            options: dict[str, Any] = {
                key: args[key] for key in ("burst", "wait", "clean", "smoke", "replace") if key in args
            }
            if "timeout" in args:
                options["timeout_s"] = args["timeout"]
            profile = run.inventory.profile(args.get("profile"))
            request = bench_request(step, run.inventory.root)
            report = serve.launch(run, profile, hosts, log_tag=args["log_tag"], extra=args.get("args", ()), **options)
            return report if request is None else bench.after_launch(run, hosts, report, request, nodes=profile.nodes)
        case "bench":
            request = bench_request(step, run.inventory.root)
            assert request is not None
            return bench.bench(run, hosts, request, attempt=args.get("attempt"), log_tag=args.get("log_tag"))
        case "compare":
            names = parse_names(args["attempts"], hosts=False)
            return keep.compare_each(run, hosts, names, keep_better="keep" in args, at=args.get("at"))
        case "wait":
            return serve.wait(
                run,
                hosts,
                attempt=args.get("attempt"),
                timeout_s=args.get("timeout"),
                smoke=args.get("smoke", True),
                burst=args.get("burst"),
            )
        case "smoke":
            return serve.read_each(run, "smoke", hosts, smoke_arguments(**args))
        case "logs":
            return logs.logs(run, hosts, args, on_data)
        case "status" | "history" | "doctor":
            return serve.doctor(run, hosts) if step.name == "doctor" else serve.read_each(run, step.name, hosts, args)
        case "stop" | "clean":
            return serve.ask_each(run, step.name, hosts, args)
        case "run":
            asked: dict[str, Any] = {key: args[key] for key in ("argv", "env", "cwd") if key in args}
            return serve.ask_each(run, "run", hosts, {**asked, "timeout_s": args.get("timeout")})
        case "copy":
            return _copy(run, hosts, args)
        case _:
            return _pause(run, hosts, args)


def smoke_arguments(
    *,
    attempt: int | None = None,
    burst: int | None = None,
    prompt: str | None = None,
    expect: str | None = None,
    max_tokens: int | None = None,
) -> dict[str, Any]:
    """The agent's arguments of a smoke; the attempt's own prompt unless one is given."""
    args: dict[str, Any] = {"attempt": attempt, "burst": burst}
    if prompt is not None:
        args["smoke"] = {"prompt": prompt, "max_tokens": max_tokens or 32, "expect": expect or "", "burst": burst or 0}
    return args


def _copy(run: Run, hosts: Sequence[Host], args: dict[str, Any]) -> Report:
    source = run.inventory.root / args["source"]
    try:
        content = source.read_bytes()
    except OSError as error:
        raise DeployError(f"{source} cannot be read: {error.strerror}") from error
    mode = int(args["mode"], 8) if "mode" in args else source.stat().st_mode & 0o777
    asked = {"target": args["target"], "mode": mode}
    return run.each(
        hosts,
        lambda host: HostReport.from_result(host.name, run.ask(host, "copy", asked, blobs={"content": content})),
        command="copy",
    )


def _pause(run: Run, hosts: Sequence[Host], args: dict[str, Any]) -> Report:
    """Wait, unless Ctrl-C comes first."""
    try:
        run.interrupted.wait(args["seconds"])
    except KeyboardInterrupt:
        run.interrupt()
    code = EXIT_INTERRUPTED if run.interrupted.is_set() else 0
    status = "interrupted" if code else "ok"
    return Report(command="pause", hosts=tuple(HostReport(name=h.name, status=status, exit_code=code) for h in hosts))
