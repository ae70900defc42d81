"""A comparison as text, from its JSON: who is compared, the numbers by concurrency, bars, and what differs."""

import shutil
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deployctl.render.bench import number
from deployctl.render.terminal import coloured, duration, neutral, style, table

_KINDS = {"run": "", "argument": "argument ", "environment": "environment ", "server": "server says "}
_LEAST_BAR = 10
_MOST_BAR = 60
_EIGHTHS = " ▏▎▍▌▋▊▉"


def lines(value: Mapping[str, Any]) -> list[str]:
    """Everything, the patch diffs last.

    Args:
        value: What `Comparison.as_json` makes.
    """
    labels = [side["label"] for side in value["attempts"]]
    shown = [_about(_letter(place), side) for place, side in enumerate(value["attempts"])]
    if value["levels"]:
        shown += ["", *_levels(labels, value)]
    if value["headlines"]:
        shown += ["", *(style(neutral(line), "bold") for line in value["headlines"])]
    if value["threshold"]:
        shown += ["", *_threshold(value["threshold"])]
    if value["levels"]:
        shown += ["", *bars(labels, value["levels"])]
    heads = [neutral(label) for label in labels]
    if value["differences"]:
        cells = [
            [neutral(_KINDS[one["kind"]] + one["name"]), *(neutral(one["values"][label] or "-") for label in labels)]
            for one in value["differences"]
        ]
        shown += ["", *table(cells, ["differs", *heads])]
    if value["phases"]:
        cells = [
            [neutral(phase["name"]), *(_seconds(phase["seconds"][label]) for label in labels)]
            for phase in value["phases"]
        ]
        shown += ["", *table(cells, ["load phase", *heads])]
    if value["warnings"]:
        shown += ["", *(style(neutral(f"warning: {text}"), "yellow") for text in value["warnings"])]
    unmeasured = [side["label"] for side in value["attempts"] if side["bench"] is None]
    if unmeasured:
        shown += ["", style(neutral(f"without a bench: {', '.join(unmeasured)}"), "yellow")]
        shown += [f"  next: {neutral(command)}" for command in value["next"]]
    for one in value.get("patch_diffs") or ():
        shown += ["", *_patch_diff(one)]
    return shown


def _threshold(advice: Mapping[str, Any]) -> list[str]:
    """Up to how many requests speculation pays, and the flags that say so."""
    shown = [style(neutral(f"threshold: {advice['reason']}"), "bold")]
    if advice["flags"]:
        shown.append(f"  use {' '.join(advice['flags'])}")
    if advice["next"]:
        shown.append(f"  next: {neutral(advice['next'])}")
    return shown


def _letter(place: int) -> str:
    """What a side is called in the table: a to z, then aa, ab, ..."""
    more, last = divmod(place, 26)
    return (_letter(more - 1) if more else "") + string.ascii_lowercase[last]


def _seconds(value: float | None) -> str:
    return "-" if value is None else duration(value)


def _about(letter: str, side: Mapping[str, Any]) -> str:
    parts = [
        f"attempt {side['attempt']} on {side['host']}",
        " + ".join(side["patches"]) or "base",
        f"{side['profile']}, {side['state']}",
        f"engine {side['version']}" if side["version"] else "",
        f"bench {side['bench']['bench']}" if side["bench"] else "no bench",
    ]
    return neutral(f"{letter}  {side['label']}: {', '.join(part for part in parts if part)}")


def _levels(labels: Sequence[str], value: Mapping[str, Any]) -> list[str]:
    """The table by concurrency; the columns of one kind stand together."""
    letters = [_letter(place) for place in range(len(labels))]
    header = ["C", *(f"tok/s {letter}" for letter in letters), *(f"{letter}/a" for letter in letters[1:])]
    columns: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("TTFT", lambda level: number(level["ttft_ms"]["p50"])),
        ("TPOT", lambda level: number(level["tpot_ms"]["p50"], 2)),
    ]
    levels = [row["attempts"][label] for row in value["levels"] for label in labels]
    if any(level and level["accept_length"] is not None for level in levels):
        columns.append(("accept", lambda level: number(level["accept_length"], 2)))
    for name, _ in columns:
        header += [f"{name} {letter}" for letter in letters]
    cells = []
    for row in value["levels"]:
        told = [row["attempts"][label] for label in labels]
        cell = [str(row["concurrency"])]
        cell += [_throughput(level, best=row["best"] == label) for label, level in zip(labels, told, strict=True)]
        cell += [f"{level['ratio']:.2f}x" if level and level["ratio"] else "-" for level in told[1:]]
        for _, show in columns:
            cell += [show(level) if level and level["good"] else "-" for level in told]
        cells.append(cell)
    caption = "tok/s: output tokens per second, all requests; TTFT and TPOT: median in ms; *: the highest"
    partial: dict[str, list[str]] = {}
    for one in value["measured_only_by"]:
        partial.setdefault(", ".join(one["attempts"]), []).append(f"C={one['concurrency']}")
    only = [style(neutral(f"only {who} at {', '.join(where)}"), "yellow") for who, where in partial.items()]
    return [*table(cells, header), style(caption, "dim"), *only]


def _throughput(level: Mapping[str, Any] | None, *, best: bool) -> str:
    if level is None:
        return "-"
    return number(level["output_tok_per_s"]) + ("*" if best else "") if level["good"] else "failed"


def bars(labels: Sequence[str], levels: Sequence[Mapping[str, Any]]) -> list[str]:
    """Throughput by concurrency as bars on one scale from zero; plain characters where nobody looks.

    Args:
        labels: What the sides are called.
        levels: Of the comparison's JSON.
    """
    smooth = coloured(sys.stdout) and "utf" in (sys.stdout.encoding or "").lower()
    names = [neutral(label) for label in labels]
    name_width = max(len(name) for name in names)
    head_width = max(len(f"C={row['concurrency']}") for row in levels)
    room = shutil.get_terminal_size((100, 24)).columns - name_width - head_width - 14
    width = min(_MOST_BAR, max(_LEAST_BAR, room))
    speeds = [
        level["output_tok_per_s"] or 0.0
        for row in levels
        for level in row["attempts"].values()
        if level and level["good"]
    ]
    highest = max(speeds, default=0.0)
    shown = []
    for row in levels:
        head = f"C={row['concurrency']}"
        for label, name in zip(labels, names, strict=True):
            level = row["attempts"][label]
            if level is None:
                continue
            speed = level["output_tok_per_s"] if level["good"] else None
            bar = _bar(speed / highest * width, smooth=smooth) if speed and highest else ""
            painted = style(bar, "green" if row["best"] == label else "dim") + " " if bar else ""
            text = number(speed) if level["good"] else "failed"
            shown.append(f"{head.ljust(head_width)}  {name.ljust(name_width)}  {painted}{text}")
            head = ""
    return shown


def _bar(length: float, *, smooth: bool) -> str:
    """A bar of so many characters; the shortest is still seen."""
    if not smooth:
        return "#" * max(1, round(length))
    whole, eighths = divmod(max(1, round(length * 8)), 8)
    return "█" * whole + (_EIGHTHS[eighths] if eighths else "")


def _patch_diff(one: Mapping[str, Any]) -> list[str]:
    shown = [style(neutral(f"from {one['against']} to {one['attempt']}"), "bold")]
    if one["note"]:
        shown.append(style(neutral(f"  {one['note']}"), "yellow"))
    if one["diff"]:
        return shown + [_diff_line(neutral(line)) for line in one["diff"].rstrip("\n").split("\n")]
    return shown if one["note"] else [*shown, "  both ran the same files"]


def _diff_line(line: str) -> str:
    if line.startswith(("diff ", "+++", "---")):
        return style(line, "bold")
    colour = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1])
    return style(line, colour) if colour else line


def step_lines(fields: Mapping[str, Any]) -> list[str]:
    """What a playbook's step says of one host: the comparison, and which attempt serves from now on."""
    shown = lines(fields["comparison"]) if "comparison" in fields else []
    kept = fields.get("kept")
    if kept and (kept["running"] or kept["relaunched_as"]):
        text = f"{kept['reason']}: {kept['label']} stays up"
        if kept["relaunched_as"]:
            text = f"{kept['reason']}: {kept['label']} serves again, as {kept['relaunched_as']}"
        shown += ["", style(neutral(text), "bold")]
    return shown
