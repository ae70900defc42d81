"""The report as a value: what hosts told, judged, named, grouped and bounded, ready to be drawn. Pure."""

import datetime as dt
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from deployctl.domain.bench import Record, unlike
from deployctl.domain.compare import labels, load_of
from deployctl.domain.dossier import verdict_of
from deployctl.render.report.headline import Entry, best_by_concurrency, headline

# Of all diffs together: a report is mailed and opened on a phone.
_DIFF_CHARACTERS = 700_000
_LEAST_OF_A_DIFF = 4_000
_SELECTED = 5
_SPREADS = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
_FRAMES = 6
# Terminal controls, and what turns the reading order or hides: shown, not obeyed.
_HOSTILE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def build(
    dossiers: Mapping[str, Mapping[str, Any]],
    failures: Mapping[str, Mapping[str, Any]],
    *,
    at: dt.datetime,
    version: str,
    command: str = "deployctl report",
) -> dict[str, Any]:
    """Everything the page shows.

    Args:
        dossiers: What each host that answered told, by name.
        failures: `{"status", "exit", "error"}` of each host that did not.
        at: When it was asked.
        version: deployctl's.
        command: The command line that made it.

    Returns:
        A JSON value whose texts hold no controls and no marks that turn the reading order.
    """
    told = {harmless(name): harmless(dossier) for name, dossier in dossiers.items()}
    names = _names(told)
    attempts = [_attempt(host, one, names) for host, dossier in told.items() for one in dossier["attempts"]]
    attempts.sort(key=lambda one: (one["at"], one["host"], one["attempt"]))
    loads = _loads(attempts)
    _number_colours(attempts, loads)
    for one in attempts:
        del one["records"]
    return {
        "at": _milliseconds(at.isoformat()),
        "version": version,
        "command": harmless(command),
        "hosts": [_host(name, dossier) for name, dossier in told.items()],
        "failures": [{"host": harmless(name), **harmless(dict(one))} for name, one in failures.items()],
        "attempts": attempts,
        "loads": loads,
        "crashes": _crashes(attempts),
        "releases": _releases(told, attempts),
        "benchCommand": _bench_command(attempts, told),
    }


def harmless(value: Any) -> Any:
    """The same value without infinities, and its texts without controls, lone surrogates and bidirectional marks."""
    if isinstance(value, str):
        return _HOSTILE.sub(lambda match: f"\\x{ord(match[0]):02x}" if ord(match[0]) < 256 else _u(match[0]), value)
    if isinstance(value, Mapping):
        return {harmless(key): harmless(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [harmless(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _u(character: str) -> str:
    return f"\\u{ord(character):04x}"


def _milliseconds(stamp: str | None) -> int | None:
    """Milliseconds of the epoch, as a browser counts; None for what is no time."""
    try:
        return round(dt.datetime.fromisoformat(str(stamp)).timestamp() * 1000)
    except ValueError:
        return None


# -- hosts and attempts ------------------------------------------------------------------------------------------------


def _host(name: str, dossier: Mapping[str, Any]) -> dict[str, Any]:
    kinds: dict[tuple[str, Any], int] = {}
    for card in dossier["gpus"]:
        key = (card["name"], card.get("memory_total_mib"))
        kinds[key] = kinds.get(key, 0) + 1
    current = next((one for one in dossier["releases"] if one.get("current")), None)
    return {
        "name": name,
        "package": dossier["package"],
        "version": dossier.get("version"),
        "gpus": [{"count": count, "name": kind, "mib": mib} for (kind, mib), count in kinds.items()],
        "release": dossier.get("release"),
        "patches": current["patches"] if current else [],
        "attempts": len(dossier["attempts"]),
        "problems": list(dossier.get("problems") or []),
        "busy": dossier.get("push_in_progress"),
    }


def _names(told: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, int], str]:
    """What to call each attempt, as a comparison does."""
    everyone = [(host, one) for host, dossier in told.items() for one in dossier["attempts"]]
    return {(host, one["attempt"]): name for (host, one), name in zip(everyone, labels(everyone), strict=True)}


def _attempt(host: str, one: Mapping[str, Any], names: Mapping[tuple[str, int], str]) -> dict[str, Any]:
    verdict = verdict_of(one)
    crash = one.get("crash")
    records = []
    for bench in one.get("benches") or []:
        try:
            records.append(Record.decode(bench))
        except (KeyError, TypeError, ValueError):
            continue  # written by another version, or by hand: the attempt is told all the same
    return {
        "id": f"{host}:{one['attempt']}",
        "name": names[host, one["attempt"]],
        "host": host,
        "attempt": one["attempt"],
        "tag": one["log_tag"],
        "profile": one["profile"],
        "release": one["release"],
        "patches": one["patches"],
        "version": one.get("version"),
        "at": _milliseconds(one["at"]),
        "ended": _milliseconds(one["ended"]) if one.get("ended") else None,
        "by": one["by"],
        "command": shlex.join(str(word) for word in one["argv"]),
        "env": one["env"],
        "state": one["state"],
        "words": verdict.words,
        "kind": verdict.kind,
        "phases": [{"name": phase["name"], "seconds": phase["seconds"]} for phase in one.get("phases") or []],
        "ready": one.get("ready_seconds"),
        "smoke": _smoke(one.get("smoke")),
        "crash": crash,
        "cause": crash["cause"] if crash else None,
        "log": one["log"],
        "benches": len(records),
        "best": max((level.output_tok_per_s or 0 for r in records for level in r.measured.values()), default=0) or None,
        "colour": None,
        "records": records,
    }


def _smoke(smoke: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if not smoke:
        return None
    burst = smoke.get("burst") or {}
    return {
        "problem": smoke.get("problem"),
        "text": str(smoke.get("text") or "")[:200],
        "answered": burst.get("answered"),
        "sent": burst.get("sent"),
    }


# -- benches -----------------------------------------------------------------------------------------------------------


def _loads(attempts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Benches that sent the same to the same model on the same GPUs, together; those of most attempts first."""
    grouped: dict[str, list[tuple[Mapping[str, Any], Record, int]]] = {}
    for one in attempts:
        newest: dict[str, tuple[Record, int]] = {}
        for record in one["records"]:
            if record.levels:
                key = _load_key(record)
                newest[key] = (record, newest.get(key, (record, 0))[1] + 1)
        for key, (record, count) in newest.items():
            grouped.setdefault(key, []).append((one, record, count))
    loads = [_load(members) for members in grouped.values()]
    return sorted(loads, key=lambda load: -len(load["series"]))


def _load_key(record: Record) -> str:
    on = [record.settings.get(key) for key in ("gpus", "model_path")]
    return json.dumps([*load_of(record), *on], sort_keys=True, default=str)


def _load(members: Sequence[tuple[Mapping[str, Any], Record, int]]) -> dict[str, Any]:
    entries = [Entry(name=one["name"], record=record, baseline=not one["patches"]) for one, record, _ in members]
    sentences, leading = headline(entries)
    first = members[0][1]
    prompts = first.load.get("prompts") or {}
    selected = [entry.name for entry in leading]
    for one, _, _ in reversed(members):
        if len(selected) < _SELECTED and one["name"] not in selected:
            selected.append(one["name"])
    return {
        "name": str(prompts.get("name") or "prompts"),
        "count": prompts.get("count"),
        "maxTokens": first.load.get("max_tokens"),
        "perLevel": first.load.get("requests_per_level"),
        "seed": first.load.get("seed"),
        "generator": first.generator,
        "gpus": _counted(first.settings.get("gpus")),
        "model": first.settings.get("model_path"),
        "levels": sorted({level.concurrency for _, record, _ in members for level in record.levels}),
        "headline": sentences,
        "leading": [entry.name for entry in leading],
        "best": {str(level): name for level, name in best_by_concurrency(entries).items()},
        "notes": _notes(entries, leading),
        "series": [_series(one, record, count, one["name"] in selected) for one, record, count in members],
    }


def _counted(names: Any) -> str:
    """`8 x NVIDIA H200` of a list of names."""
    listed = [str(name) for name in names] if isinstance(names, (list, tuple)) else []
    return ", ".join(f"{listed.count(name)} \u00d7 {name}" for name in dict.fromkeys(listed))


def _notes(entries: Sequence[Entry], leading: Sequence[Entry]) -> list[str]:
    """What to know before one believes the curves: levels that failed, and what is not like for like."""
    notes = []
    for entry in entries:
        for level in entry.record.levels:
            if not level.good:
                why = level.problem or f"{level.sent - level.completed} of {level.sent} requests failed"
                notes.append(f"{entry.name} at C={level.concurrency}: {why}")
        if entry.record.state == "crashed":
            cause = (entry.record.crash or {}).get("cause")
            notes.append(f"{entry.name}: the server died during the bench" + (f": {cause}" if cause else ""))
    if leading:
        reference = leading[0]
        for entry in leading[1:]:
            for sentence in unlike(reference.record, entry.record):
                notes.append(f"{reference.name} and {entry.name} are not like for like: {sentence}")
    return list(dict.fromkeys(notes))


def _series(one: Mapping[str, Any], record: Record, count: int, selected: bool) -> dict[str, Any]:
    levels = {}
    for level in record.levels:
        spreads = {name: [getattr(level, name).p50, getattr(level, name).p99] for name in _SPREADS}
        levels[str(level.concurrency)] = {
            "good": level.good,
            "sent": level.sent,
            "completed": level.completed,
            "tok": level.output_tok_per_s,
            "req": level.requests_per_s,
            "accept": level.accept_length,
            **spreads,
        }
    return {
        "id": one["id"],
        "name": one["name"],
        "selected": selected,
        "bench": record.bench,
        "benches": count,
        "state": record.state,
        "settings": {key: value for key, value in record.settings.items() if value is not None},
        "levels": levels,
    }


def _number_colours(attempts: Sequence[dict[str, Any]], loads: Sequence[Mapping[str, Any]]) -> None:
    """A number of its own for each measured attempt; those that are shown first get the first, most distinct ones."""
    shown = [line["id"] for load in loads for line in load["series"] if line["selected"]]
    hidden = [line["id"] for load in loads for line in load["series"] if not line["selected"]]
    order = {identity: number for number, identity in enumerate(dict.fromkeys([*shown, *hidden]))}
    for one in attempts:
        one["colour"] = order.get(one["id"])


def _bench_command(attempts: Sequence[Mapping[str, Any]], told: Mapping[str, Any]) -> str:
    living = [one for one in attempts if one["state"] == "ready"]
    where = f" --host {shlex.quote(living[-1]['host'])}" if living and len(told) > 1 else ""
    return f"deployctl bench{where} --sweep 1,2,4,8,16,32,64"


# -- crashes and releases ----------------------------------------------------------------------------------------------


def _crashes(attempts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One card for each kind of crash, newest first: the same cause on the same patched line is one kind."""
    cards: dict[str, dict[str, Any]] = {}
    for one in attempts:
        crash = one.pop("crash")
        if not crash:
            continue
        patched = crash.get("patched")
        line = [patched["patch"], patched["file"], patched["text"]] if patched else None
        key = json.dumps([crash["cause"], line])
        earlier = cards.pop(key, {"attempts": []})
        cards[key] = {**_crash(crash), "attempts": [*earlier["attempts"], one["id"]]}
    # Those that a patch has to do with come first: they are what the next patch is written for.
    newest_first = list(cards.values())[::-1]
    ordered = sorted(newest_first, key=lambda card: card["patched"] is None)
    for place, card in enumerate(ordered):
        for one in attempts:
            if one["id"] in card["attempts"]:
                one["card"] = place
    return ordered


def _crash(crash: Mapping[str, Any]) -> dict[str, Any]:
    frames = crash.get("frames") or []
    inner = len(frames) - _FRAMES
    ending = f"signal {crash['signal']}" if crash.get("signal") else f"exit status {crash.get('exit_code')}"
    if not crash.get("signal") and crash.get("exit_code") is None:
        ending = "no exit record"
    return {
        "cause": crash["cause"],
        "ending": ending,
        "patched": crash.get("patched"),
        "frames": [
            {
                "file": frame["file"],
                "line": frame["line"],
                "function": frame["function"],
                "text": frame.get("text") or "",
                "patch": frame.get("patch"),
                # The innermost frames say where it broke, the patched ones why; the others are a click away.
                "outer": number < inner and not frame.get("patch"),
            }
            for number, frame in enumerate(frames)
        ],
        "tail": [] if frames else list(crash.get("tail") or [])[-8:],
        "log": crash.get("log"),
    }


def _releases(told: Mapping[str, Mapping[str, Any]], attempts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Releases that change something, newest first; the same stack with the same diff on several hosts is one."""
    cards: dict[str, dict[str, Any]] = {}
    for host, dossier in told.items():
        for release in dossier["releases"]:
            if not release["number"]:
                continue
            key = json.dumps([release["patches"], release["diff"]])
            card = cards.setdefault(
                key,
                {
                    "patches": release["patches"],
                    "version": release.get("version"),
                    "diff": release["diff"],
                    "cut": release["diff_truncated"],
                    "files": [_changed(file) for file in release["files"]],
                    "where": [],
                },
            )
            ran = [one["id"] for one in attempts if (one["host"], one["release"]) == (host, release["number"])]
            card["where"].append(
                {
                    "host": host,
                    "number": release["number"],
                    "parent": release["parent"],
                    "at": _milliseconds(release["at"]),
                    "by": release["by"],
                    "command": release["command"],
                    "current": bool(release.get("current")),
                    "attempts": ran,
                }
            )
    ordered = sorted(cards.values(), key=lambda card: -max(where["at"] or 0 for where in card["where"]))
    return _bounded(ordered)


def _changed(file: Mapping[str, Any]) -> dict[str, str]:
    kind = "added" if file["before"] is None else "removed" if file["after"] is None else "changed"
    return {"path": file["path"], "kind": kind}


def _bounded(cards: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All diffs together within bounds: longer ones than their share are cut at a line, and that is said."""
    share = max(_LEAST_OF_A_DIFF, _DIFF_CHARACTERS // max(1, len(cards)))
    if sum(len(card["diff"]) for card in cards) <= _DIFF_CHARACTERS:
        return cards
    for card in cards:
        if len(card["diff"]) > share:
            card["diff"] = card["diff"][: card["diff"].rfind("\n", 0, share) + 1]
            card["cut"] = True
    return cards
