"""Results as text: what a tired person reads at the end of a command."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from deployctl.domain.report import HostReport, Report
from deployctl.errors import DeployError
from deployctl.render import bench, compare, crash
from deployctl.render.terminal import counted, duration, listed, neutral, out, say, size, style, table, when, worded

_GOOD = {
    "complete",
    "pushed",
    "unchanged",
    "rolled_back",
    "planned",
    "ready",
    "ok",
    "stopped",
    "clean",
    "held",
    "released",
}


def failure(error: DeployError) -> None:
    """An error before or beside any host's result."""
    say(style(f"error: {neutral(error.message)}", "red", stream=sys.stderr))
    if error.hint:
        say(f"hint: {neutral(error.hint)}")


def report(result: Report, *, verbose: bool = False) -> None:
    """Every host's own result."""
    several = len(result.hosts) > 1
    hosts = [harmless(host) for host in result.hosts]
    for host in hosts:
        lines = _lines(result.command, host, verbose=verbose)
        for line in lines:
            out(f"{host.name} | {line}" if several else line)
    for host in hosts:
        if host.error:
            _problem(host, several=several)


def harmless(host: HostReport) -> HostReport:
    """A report whose texts come without terminal controls: what is rendered below adds only its own."""
    error = None if host.error is None else _harmless(host.error)
    return replace(host, status=neutral(host.status), error=error, fields=_harmless(host.fields))


def _harmless(value: Any) -> Any:
    if isinstance(value, str):
        return neutral(value)
    if isinstance(value, Mapping):
        return {key: _harmless(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_harmless(inner) for inner in value]
    return value


def _problem(host: HostReport, *, several: bool) -> None:
    assert host.error is not None
    prefix = f"{host.name} | " if several else ""
    if host.fields.get("crash"):
        # The card above has said it.
        say(f"{prefix}hint: {neutral(str(host.error['hint']))}")
        return
    for number, line in enumerate(neutral(str(host.error["message"])).splitlines()):
        shown = f"error: {line}" if number == 0 else f"  {line}"
        say(prefix + style(shown, "red", stream=sys.stderr))
    if host.error.get("hint"):
        say(f"{prefix}hint: {neutral(str(host.error['hint']))}")


def _status_word(host: HostReport) -> str:
    return style(worded(host.status), "bold", "green" if host.status in _GOOD else "red")


def _lines(command: str, host: HostReport, *, verbose: bool) -> list[str]:
    if host.status in ("unreachable", "interrupted") and not host.fields:
        return [_status_word(host)]
    show = {
        "push": _push,
        "rollback": _push,
        "launch": _launch,
        "wait": _launch,
        "smoke": _launch,
        "bench": _bench,
        "compare": _compare,
        "report": _told,
        "status": _status,
        "history": _history,
        "stop": _stop,
        "clean": _clean,
        "lock": _lock,
        "audit": _audit,
        "doctor": _doctor,
        "run": _run,
    }.get(command)
    if show is None:
        return [_status_word(host)]
    return show(host, verbose)


def _push(host: HostReport, verbose: bool) -> list[str]:
    fields = host.fields
    stack = " + ".join(fields.get("patches") or []) or "base"
    release = fields.get("release")
    if release is None:
        lines = [_status_word(host)]
    elif host.status == "planned":
        lines = [f"{_status_word(host)}  {neutral(stack)}; the host stays at release {release}"]
    else:
        lines = [f"{_status_word(host)}  release {release} ({neutral(stack)})"]
    if "alias_of" in fields:
        lines.append(f"  the same machine as {fields['alias_of']}")
    for changed in fields.get("files") or []:
        mark = "A" if changed["before"] is None else "D" if changed["after"] is None else "M"
        hashes = f"{(changed['before'] or '-')[:8]} -> {(changed['after'] or '-')[:8]}"
        lines.append(f"  {mark} {neutral(changed['path'])}  {style(hashes, 'dim')}")
    if fields.get("verified"):
        lines.append(f"  imported and proven to be the patched files: {', '.join(fields['verified'])}")
    for warning in fields.get("warnings") or []:
        lines.append(style(f"  warning: {neutral(warning)}", "yellow"))
    if fields.get("diff"):
        lines += ["", *neutral(fields["diff"]).rstrip("\n").split("\n")]
    if verbose and fields.get("steps"):
        lines.append("  " + ", ".join(f"{name} {duration(seconds)}" for name, seconds in fields["steps"].items()))
    if host.status == "pushed":
        lines.append(style(f"  back with: deployctl rollback{host.where}", "dim"))
    return lines


def _compare(host: HostReport, verbose: bool) -> list[str]:
    shown = compare.step_lines(host.fields) or [_status_word(host)]
    return shown + _launch(host, verbose) if "log" in host.fields else shown


def _bench(host: HostReport, verbose: bool) -> list[str]:
    lines = [_status_word(host)]
    if host.fields.get("bench"):
        lines += bench.lines(host.fields["bench"])
    if host.fields.get("crash"):
        lines += crash.card(host.fields["crash"])
    return lines


def _launch(host: HostReport, verbose: bool) -> list[str]:
    fields = host.fields
    if "attempt" not in fields or "log_tag" not in fields:
        return [_status_word(host)]
    where = f"pid {fields.get('pid')}, {fields.get('url')}"
    lines = [f"{_status_word(host)}  attempt {fields['attempt']} ({neutral(fields['log_tag'])}), {where}"]
    if fields.get("ready_seconds") is not None:
        parts = ", ".join(f"{phase['name']} {duration(phase['seconds'])}" for phase in fields.get("phases") or [])
        lines.append(f"  ready in {duration(fields['ready_seconds'])}" + (f" ({parts})" if parts else ""))
    smoke = fields.get("smoke")
    if smoke and smoke.get("text"):
        lines.append(f"  smoke: {neutral(repr(smoke['text']))[:100]}")
    if smoke and smoke.get("burst") and not smoke["burst"]["problem"]:
        burst = smoke["burst"]
        lines.append(
            f"  burst: {burst['answered']} of {burst['sent']} answered, slowest {duration(burst['slowest_seconds'])}"
        )
    if fields.get("bench"):
        lines += bench.lines(fields["bench"])
    if fields.get("crash"):
        lines += crash.card(fields["crash"])
    cleaned = fields.get("clean") or {}
    if cleaned.get("unverified"):
        lines.append(style(f"  GPU memory was not checked: {neutral(cleaned['unverified'])}", "yellow"))
    if cleaned.get("devices"):
        lines += _tools(cleaned)
    lines.append(f"  log {neutral(str(fields.get('log')))}")
    if host.status == "loading":
        lines.append(style(f"  come back with: deployctl wait{host.where}", "dim"))
    return lines


def _status(host: HostReport, verbose: bool) -> list[str]:
    fields = host.fields
    lines = []
    if fields.get("release") is None:
        lines.append("release   nothing pushed yet")
    else:
        stack = " + ".join(fields["patches"]) or "base"
        lines.append(f"release   {fields['release']} ({neutral(stack)}), {fields['package_dir']} {fields['version']}")
    drift = fields.get("drift") or []
    if drift:
        lines.append(style(f"drift     {fields['drift_summary']}: {listed(d['path'] for d in drift)}", "yellow"))
    server = fields.get("server")
    if server:
        phase = f" ({server['phase']})" if server.get("phase") else ""
        word = style(worded(server["state"]), "bold", "green" if server["state"] == "ready" else "yellow")
        tag = neutral(server["log_tag"])
        lines.append(
            f"server    {word}{phase}  attempt {server['attempt']} ({server['profile']}, {tag}), "
            f"pid {server['pid']}, {server['url']}, "
            f"up {duration(server['uptime_s'])}, release {server['release']}"
        )
    else:
        lines.append("server    none running")
    attempt = fields.get("attempt")
    if attempt and (not server or attempt["attempt"] != server["attempt"]):
        cause = f": {neutral(attempt['cause'])}" if attempt.get("cause") else ""
        lines.append(
            f"last      attempt {attempt['attempt']} ({neutral(attempt['log_tag'])}) {worded(attempt['state'])}{cause}"
        )
    orphans = fields.get("orphans") or []
    if orphans:
        pids = ", ".join(str(orphan["pid"]) for orphan in orphans)
        lines.append(
            style(
                f"orphans   launcher dead, {counted(len(orphans), 'orphan')}: {pids}; "
                f"deployctl stop{host.where} ends what is left",
                "yellow",
            )
        )
    for card in fields.get("gpus") or []:
        lines.append(f"gpu {card['index']}     {card['name']}  {card['used_mib']} of {card['total_mib']} MiB")
    for holder in fields.get("holders") or []:
        whose = f"attempt {holder['attempt']}" if holder["attempt"] else "foreign"
        lines.append(f"holder    pid {holder['pid']} ({holder['user']}, {whose}) {neutral(holder['command'][:80])}")
    for name, state in (fields.get("tools") or {}).items():
        if state != "ok":
            lines.append(style(f"tool      {_tool(name, state)}", "yellow"))
    hold = fields.get("hold")
    if hold:
        lines.append(style(f"held      by {neutral(hold['operator'])}: {neutral(hold['message'])}", "yellow"))
    busy = fields.get("push_in_progress")
    if busy:
        lines.append(
            style(f"busy      {neutral(busy['command'])} of {neutral(busy['operator'])} is in progress", "yellow")
        )
    lines += [style(f"problem   {neutral(problem)}", "red") for problem in fields.get("problems") or []]
    return lines


def _history(host: HostReport, verbose: bool) -> list[str]:
    rows = [
        [
            ("* " if entry["current"] else "  ") + str(entry["release"]),
            " + ".join(entry["patches"]) or "base",
            entry["version"] + (" (earlier install)" if entry["other_base"] else ""),
            counted(entry["files"], "file"),
            when(entry["at"]),
            entry["by"],
        ]
        for entry in host.fields.get("releases") or []
    ]
    lines = table(rows, ["  release", "stack", "version", "changed", "at", "by"]) if rows else ["no releases"]
    rows = [
        [
            attempt["attempt"],
            attempt["log_tag"],
            attempt["profile"],
            attempt["release"],
            worded(attempt["state"]),
            duration(attempt["ready_seconds"]) if attempt["ready_seconds"] is not None else None,
            when(attempt["at"]),
            (attempt["cause"] or "")[:70],
        ]
        for attempt in host.fields.get("attempts") or []
    ]
    if rows:
        lines += ["", *table(rows, ["attempt", "tag", "profile", "release", "state", "ready in", "at", "cause"])]
    return lines


def _stop(host: HostReport, verbose: bool) -> list[str]:
    lines = [_status_word(host)]
    for entry in host.fields.get("stopped") or []:
        note = f"; {entry['note']}" if entry.get("note") else ""
        lines.append(
            f"  attempt {entry['attempt']} ({neutral(entry['log_tag'])}): "
            f"{counted(len(entry['ended']), 'process', 'processes')} ended{note}"
        )
    return lines


def _clean(host: HostReport, verbose: bool) -> list[str]:
    fields = host.fields
    lines = [_status_word(host)]
    if not fields.get("devices") and "devices" in fields:
        lines.append("  no GPU devices on this host")
    lines += [f"  ended pid {entry['pid']} {neutral(entry['command'][:80])}" for entry in fields.get("ended") or []]
    lines += [
        f"  kept: attempt {entry['attempt']} is a healthy server of ours (pid {entry['pid']}); "
        f"deployctl stop{host.where} ends it"
        for entry in fields.get("kept") or []
    ]
    lines += [f"  spared pid {entry['pid']} {neutral(entry['command'][:80])}" for entry in fields.get("spared") or []]
    lines += [f"  gpu {card['index']}: {card['used_mib']} MiB in use" for card in fields.get("gpus") or []]
    leftovers = fields.get("shm_removed") or []
    if leftovers:
        left = counted(len(leftovers), "leftover")
        lines.append(f"  {left} of dead servers removed from shared memory: {listed(leftovers)}")
    return lines + _tools(fields)


def _tools(fields: Mapping[str, Any]) -> list[str]:
    """The tools that could not be asked: what they would have shown is unknown, not good.

    One that left the GPUs' memory unverified is said with that, and not again.
    """
    return [
        style(f"  {_tool(name, state)}", "yellow")
        for name, state in (fields.get("tools") or {}).items()
        if state not in ("ok", fields.get("unverified"))
    ]


def _tool(name: str, state: str) -> str:
    """`fuser is not installed: ...`: what a state that does not name its tool says is put behind the name."""
    return neutral(state if state.startswith(f"{name} ") else f"{name}: {state}")


def _lock(host: HostReport, verbose: bool) -> list[str]:
    hold, holder = host.fields.get("hold"), host.fields.get("holder")
    lines = [_status_word(host)]
    if hold:
        lines.append(f"  held by {neutral(hold['operator'])} since {when(hold['since'])}: {neutral(hold['message'])}")
    if holder:
        lines.append(
            f"  at work: {neutral(holder['operator'])}, {neutral(holder['command'])}, since {when(holder['since'])}"
        )
    if not hold and not holder:
        lines.append("  nobody holds this host")
    return lines


def _audit(host: HostReport, verbose: bool) -> list[str]:
    rows = [
        [
            when(entry["at"]),
            entry["operator"],
            entry["command"],
            entry["status"],
            entry.get("error", "").split("\n")[0][:80],
        ]
        for entry in host.fields.get("entries") or []
    ]
    return table(rows, ["at", "who", "what", "result", "why"]) if rows else ["nothing was ever done here"]


def _doctor(host: HostReport, verbose: bool) -> list[str]:
    marks = {True: style("ok  ", "green"), False: style("FAIL", "bold", "red"), None: style("note", "yellow")}
    lines = []
    for entry in host.fields.get("checks") or []:
        hint = f"  ({neutral(entry['hint'])})" if entry["hint"] and entry["ok"] is not True else ""
        lines.append(f"{marks[entry['ok']]}  {entry['name']:<14} {neutral(entry['detail'])}{hint}")
    return lines


def _told(host: HostReport, verbose: bool) -> list[str]:
    """How much of a host a report shows."""
    fields = host.fields
    words = [counted(fields["attempts"], "attempt")]
    for key, one, many in (
        ("crashes", "crash", "crashes"),
        ("benches", "bench", "benches"),
        ("releases", "release", ""),
    ):
        words += [counted(fields[key], one, many)] if fields[key] else []
    lines = [f"{_status_word(host)}  {', '.join(words)}"]
    return lines + [style(f"  warning: {problem}", "yellow") for problem in fields["problems"]]


def _run(host: HostReport, verbose: bool) -> list[str]:
    text = str(host.fields.get("output") or "").rstrip("\n")
    return [*(neutral(line) for line in text.splitlines()), _status_word(host)]


def logs_listing(host: HostReport) -> list[str]:
    """`logs --list`."""
    host = harmless(host)
    rows = [
        [
            attempt["attempt"],
            attempt["log_tag"],
            attempt["profile"],
            worded(attempt["state"]),
            size(attempt["log_bytes"]) if attempt["log_bytes"] is not None else "missing",
            when(attempt["at"]),
            attempt["log"],
        ]
        for attempt in host.fields.get("attempts") or []
    ]
    return table(rows, ["attempt", "tag", "profile", "state", "size", "at", "log"]) if rows else ["no attempts"]
