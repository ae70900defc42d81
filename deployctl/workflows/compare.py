"""Sets attempts side by side: asks their hosts for what they know of them, once each."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from deployctl.domain.compare import Name, Side, sides_of
from deployctl.domain.comparison import Comparison, PatchDiff, comparison, contents_of
from deployctl.domain.differences import file_diff
from deployctl.domain.inventory import Host, Inventory
from deployctl.domain.report import HostReport, Report
from deployctl.errors import UsageError
from deployctl.workflows.run import Run

_PATIENCE_S = 15.0


def hosts_of(inventory: Inventory, names: Sequence[Name], selectors: Sequence[str]) -> tuple[Host, ...]:
    """The host of each name: the one that stands before it, else the one that --host or the default group means.

    Raises:
        UsageError: That is no host, or several.
    """
    found = []
    for name in names:
        hosts = inventory.select(selectors if name.host is None else [name.host])
        if len(hosts) != 1:
            each = ", ".join(f"{host.name}:{name.name}" for host in hosts)
            raise UsageError(f"{name.text} may be on several hosts", hint=f"say on which: {each}")
        found.append(hosts[0])
    return tuple(found)


def compare(
    run: Run, names: Sequence[Name], hosts: Sequence[Host], *, patch_diff: bool = False
) -> tuple[Report, Comparison | None]:
    """Ask the hosts and compare.

    Args:
        run: The run.
        names: The attempts.
        hosts: The host of each of them.
        patch_diff: Whether the files that they ran are compared too.

    Returns:
        The hosts' own outcomes, and the comparison, None where a host could not be asked or does not know its attempt.

    Raises:
        UsageError: Two of the names mean one attempt.
    """
    args = {
        host.name: {"attempts": [{"name": n.name} for n, where in _pairs(names, hosts) if where.name == host.name]}
        for host in hosts
    }
    told = _ask(run, hosts, {name: {**one, "contents": patch_diff} for name, one in args.items()})
    if told.exit_code:
        return told, None
    dossiers = {host.name: host.fields for host in told.hosts}
    sides = _sides(names, hosts, dossiers)
    diffs = None
    if patch_diff:
        missing = _missing(sides, dossiers)
        if missing:
            again = _ask(
                run,
                [host for host in _distinct(hosts) if host.name in missing],
                {name: {**args[name], "contents": True, "paths": paths} for name, paths in missing.items()},
            )
            if again.exit_code:
                return again, None
            dossiers.update({host.name: host.fields for host in again.hosts})
        diffs = [_diff(sides[0], side, dossiers) for side in sides[1:]]
    result = comparison(sides, diffs)
    damaged = [f"{name}: {text}" for name, dossier in dossiers.items() for text in dossier["problems"]]
    result = replace(result, warnings=(*result.warnings, *damaged))
    report = Report(
        command="compare",
        hosts=tuple(
            HostReport(
                name=host.name,
                status="ok",
                fields={
                    "attempts": [one["attempt"] for one in dossiers[host.name]["attempts"]],
                    "version": dossiers[host.name]["version"],
                    "gpus": dossiers[host.name]["gpus"],
                },
            )
            for host in _distinct(hosts)
        ),
        extra=result.as_json(),
    )
    return report, result


def _pairs(names: Sequence[Name], hosts: Sequence[Host]) -> list[tuple[Name, Host]]:
    return list(zip(names, hosts, strict=True))


def _distinct(hosts: Sequence[Host]) -> list[Host]:
    return list({host.name: host for host in hosts}.values())


def _ask(run: Run, hosts: Sequence[Host], args: Mapping[str, Mapping[str, Any]]) -> Report:
    def one(host: Host) -> HostReport:
        result = run.ask_patiently(host, "dossier", args[host.name], for_s=_PATIENCE_S)
        return HostReport.from_result(host.name, result)

    return run.each(_distinct(hosts), one, command="compare", detaches=True)


def _sides(names: Sequence[Name], hosts: Sequence[Host], dossiers: Mapping[str, Mapping[str, Any]]) -> tuple[Side, ...]:
    taken = dict.fromkeys(dossiers, 0)
    found = []
    for _, host in _pairs(names, hosts):
        dossier = dossiers[host.name]
        attempt = dossier["attempts"][taken[host.name]]
        taken[host.name] += 1
        found.append((host.name, attempt, [card["name"] for card in dossier["gpus"]]))
    for place, (where, attempt, _) in enumerate(found):
        for earlier, (other, same, _) in enumerate(found[:place]):
            if (where, attempt["attempt"]) == (other, same["attempt"]):
                raise UsageError(
                    f"{names[earlier].text} and {names[place].text} are one attempt: {attempt['attempt']} on {where}",
                    hint=f"deployctl history --host {where}",
                )
    return sides_of(found)


# -- what they ran -----------------------------------------------------------------------------------------------------


def _missing(sides: Sequence[Side], dossiers: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Files that another host's release changes, by the host that has not told how they are there."""
    told = {side.host: contents_of(dossiers[side.host], side) for side in sides}
    every = {path for contents in told.values() for path in contents or {}}
    return {
        host: sorted(every - contents.keys())
        for host, contents in told.items()
        if contents is not None and every - contents.keys()
    }


def _diff(first: Side, other: Side, dossiers: Mapping[str, Mapping[str, Any]]) -> PatchDiff:
    before, after = (contents_of(dossiers[side.host], side) for side in (first, other))
    unstored = [side for side, contents in ((first, before), (other, after)) if contents is None]
    if len(unstored) == 2:
        return PatchDiff(
            label=other.label, text="", note="nothing was ever pushed to their hosts: both ran it as installed"
        )
    note = ""
    if unstored:
        # Nothing was ever pushed there, so nothing is stored of it: the other host's pristine package stands in.
        side, known = (other, first) if after is None else (first, other)
        if side.attempt["version"] != known.attempt["version"]:
            note = f"nothing was ever pushed to {side.host}, and its version is another: nothing to compare with"
            return PatchDiff(label=other.label, text="", note=note)
        note = f"nothing was ever pushed to {side.host}: the pristine package of {known.host} stands for its own"
        base = dossiers[known.host]["contents"][f"0@{known.attempt['base']}"]
        before, after = (before or base, after or base)
    assert before is not None
    assert after is not None
    return PatchDiff(label=other.label, text=file_diff(before, after), note=note)
