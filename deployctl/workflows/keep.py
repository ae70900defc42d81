"""A playbook's step `compare`: each host compares attempts of its own and may keep the better server up."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from deployctl.domain.attempt import command_difference, launch_args, relaunch_tag
from deployctl.domain.compare import Name, Side, decide, sides_of
from deployctl.domain.comparison import comparison
from deployctl.domain.inventory import Host, Profile
from deployctl.domain.report import HostReport, Report
from deployctl.errors import DeployError, UsageError
from deployctl.workflows import push
from deployctl.workflows.run import Run
from deployctl.workflows.serve import launch_one

_READY = "ready"
_HIDDEN = "***"


def compare_each(
    run: Run, hosts: Sequence[Host], names: Sequence[Name], *, keep_better: bool = False, at: int | None = None
) -> Report:
    """Compare attempts on every host, and where asked see to it that the better one serves.

    The better one has the higher throughput at a concurrency. If it is not the one that runs, its release is put back
    and its profile is started again, with the arguments that it had beyond the profile's. Where two are even, the one
    that runs stays.

    Args:
        run: The run.
        hosts: Each compares attempts of its own.
        names: The attempts, without hosts.
        keep_better: Whether the better one is to serve.
        at: The concurrency that decides; the highest that all were measured at where None.
    """
    environments: dict[str, dict[int, Mapping[str, str]]] = {}

    def look(host: Host) -> HostReport:
        told = run.ask_patiently(host, "dossier", {"attempts": [{"name": name.name} for name in names]})
        if told["exit"]:
            return HostReport.from_result(host.name, told)
        gpus = [card["name"] for card in told["gpus"]]
        sides = sides_of([(host.name, attempt, gpus) for attempt in told["attempts"]])
        environments[host.name] = {one["attempt"]: one["env"] for one in told["attempts"]}
        fields: dict[str, Any] = {"comparison": comparison(sides).as_json()}
        if not keep_better:
            return HostReport(name=host.name, status="ok", fields=fields)
        try:
            fields["kept"] = _chosen(sides, told, at)
        except DeployError as error:
            return HostReport.from_error(host.name, error, **fields)
        return HostReport(name=host.name, status="kept", fields=fields)

    report = run.each(hosts, look, command="compare", detaches=True)
    if not keep_better or report.exit_code or run.interrupted.is_set():
        return report
    waiting = [host for host in hosts if not _kept(report, host)["running"]]
    for target in sorted({_kept(report, host)["release"] for host in waiting if _kept(report, host)["roll_back"]}):
        group = [h for h in waiting if _kept(report, h)["roll_back"] and _kept(report, h)["release"] == target]
        rolled_back = push.rollback(run, group, to=str(target) if target else "base", independent=True)
        report = _joined(report, rolled_back, "rollback")
    able = [host for host in waiting if _of(report, host).exit_code == 0]
    if not able or run.interrupted.is_set():
        return report

    def start(host: Host) -> HostReport:
        kept = _kept(report, host)
        return _start(run, host, kept, environments[host.name][kept["attempt"]])

    return _joined(report, run.each(able, start, command="compare", detaches=True), None)


def _of(report: Report, host: Host) -> HostReport:
    return next(one for one in report.hosts if one.name == host.name)


def _kept(report: Report, host: Host) -> Mapping[str, Any]:
    found: Mapping[str, Any] = _of(report, host).fields["kept"]
    return found


def _chosen(sides: Sequence[Side], told: Mapping[str, Any], at: int | None) -> dict[str, Any]:
    """Which side serves from now on, and what that takes."""
    decision = decide(sides, at)
    # A load of minutes for nothing: of those that are even the one that runs stays.
    running = [sides[place] for place in decision.equals if sides[place].attempt["state"] == _READY]
    side = running[0] if running else sides[decision.place]
    attempt = side.attempt
    release = attempt["release"] or 0
    runs = attempt["state"] == _READY
    return {
        "attempt": attempt["attempt"],
        "label": side.label,
        "release": release,
        "concurrency": decision.concurrency,
        "even": bool(decision.equals),
        "reason": decision.reason,
        "roll_back": not runs and release != (told["release"] or 0),
        "running": runs,
        "relaunched_as": None,
    }


def _joined(report: Report, done: Report, key: str | None) -> Report:
    """A report with what was done next on some of its hosts: under a key, or in the place of the status."""
    by_name = {host.name: host for host in done.hosts}

    def joined(before: HostReport) -> HostReport:
        after = by_name.get(before.name)
        if after is None:
            return before
        if key is None:
            return replace(after, fields={**before.fields, **after.fields})
        fields = {**before.fields, key: after.as_json()}
        if after.exit_code == 0:
            return replace(before, fields=fields)
        error = after.error
        if error and error["kind"] == "drift":
            back = f"deployctl rollback --host {after.name} --to {before.fields['kept']['release'] or 'base'}"
            error = {**error, "hint": f"{back} --dry-run shows the edits; with --force instead it sets them aside"}
        return replace(before, status=after.status, exit_code=after.exit_code, error=error, fields=fields)

    return replace(done, command=report.command, hosts=tuple(joined(host) for host in report.hosts))


def _start(run: Run, host: Host, kept: Mapping[str, Any], env: Mapping[str, str]) -> HostReport:
    """Start the like of an attempt again, in the place of the server that runs."""
    history = run.ask_patiently(host, "history")
    attempt = next(one for one in history["attempts"] if one["attempt"] == kept["attempt"])
    profile = run.inventory.profile(attempt["profile"])
    if profile.nodes > 1:
        raise UsageError(
            f"attempt {attempt['attempt']} runs over {profile.nodes} hosts: compare does not start it again",
            hint=f"deployctl launch --profile {profile.name} --log-tag TAG --replace, on all of them",
        )
    tag = relaunch_tag(attempt["log_tag"], [one["log_tag"] for one in history["attempts"]])
    extra, warnings = _extra(attempt["argv"], profile)
    warnings += _other_env(env, profile)
    for text in warnings:
        run.on_event(host.name, {"event": "warning", "text": f"not as attempt {attempt['attempt']} ran: {text}"})
    text = f"{kept['reason']}: starting {profile.name} of attempt {attempt['attempt']} again as {tag}"
    run.on_event(host.name, {"event": "note", "text": text})
    outcome = launch_one(run, host, launch_args(profile, log_tag=tag, extra=extra, replace=True))
    return replace(outcome, fields={**outcome.fields, "kept": {**kept, "relaunched_as": tag}})


def _extra(argv: Sequence[str], profile: Profile) -> tuple[list[str], list[str]]:
    """The arguments that an attempt had beyond its profile's; and what is lost where the profile has changed since."""
    size = len(profile.argv)
    # The interpreter stands first; its placeholder is filled in on the host.
    if list(argv[1:size]) == list(profile.argv[1:]):
        return list(argv[size:]), []
    gone, new = command_difference({"argv": list(argv[1:])}, profile.argv[1:])
    words = [f"without {' '.join(gone)}"] * bool(gone) + [f"with {' '.join(new)}"] * bool(new)
    return [], [f"hosts.yaml has changed: now {', '.join(words) or 'in another order'}"]


def _other_env(env: Mapping[str, str], profile: Profile) -> list[str]:
    """Variables of the profile that are not as they were; the values of secrets are not known here."""
    names = sorted(env.keys() | profile.env.keys())
    changed = [name for name in names if env.get(name) not in (profile.env.get(name), _HIDDEN)]
    return [f"hosts.yaml has changed: the environment has another {', '.join(changed)}"] if changed else []
