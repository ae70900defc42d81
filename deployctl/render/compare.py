"""A comparison as text: who is compared, the numbers by concurrency, bars, and in what the attempts differ."""

import shutil
import string
import sys
from collections.abc import Callable, Sequence

from deployctl.domain.bench import Level
from deployctl.domain.compare import Row, Side, measured_by_some
from deployctl.domain.comparison import Comparison
from deployctl.render.bench import number
from deployctl.render.terminal import coloured, duration, neutral, out, say, style, table

_KINDS = {
    "run": "",
    "argument": "argument ",
    "environment": "environment ",
    "server": "server says ",
}
_LEAST_BAR = 10
_MOST_BAR = 60
_EIGHTHS = " ▏▎▍▌▋▊▉"


def show(result: Comparison, *, as_csv: bool = False) -> None:
    """Print it; as CSV what belongs to no column goes to stderr."""
    if not as_csv:
        for line in lines(result):
            out(line)
        return
    sys.stdout.write(result.as_csv())
    for text in (*result.warnings, *(f"next: {command}" for command in result.next_commands)):
        say(neutral(text))


def lines(result: Comparison) -> list[str]:
    """Everything, the patch diffs last."""
    letters = [string.ascii_lowercase[place % 26] for place in range(len(result.sides))]
    shown = [_about(letter, side) for letter, side in zip(letters, result.sides, strict=True)]
    if result.rows:
        shown += ["", *_levels(letters, result)]
    if result.headlines:
        shown += ["", *(style(neutral(line), "bold") for line in result.headlines)]
    if result.rows:
        shown += ["", *bars(result)]
    labels = [neutral(side.label) for side in result.sides]
    if result.differences:
        cells = [
            [neutral(_KINDS[one.kind] + one.name), *(neutral("-" if v is None else v) for v in one.values)]
            for one in result.differences
        ]
        shown += ["", *table(cells, ["differs", *labels])]
    if result.phases:
        cells = [
            [neutral(name), *("-" if one is None else duration(one) for one in seconds)]
            for name, seconds in result.phases
        ]
        shown += ["", *table(cells, ["load phase", *labels])]
    if result.warnings:
        shown += ["", *(style(neutral(f"warning: {text}"), "yellow") for text in result.warnings)]
    for side in result.sides:
        if side.record is None:
            shown.append(style(neutral(f"{side.label} has no bench"), "yellow"))
    shown += [f"  next: {command}" for command in result.next_commands]
    for one in result.patch_diffs or ():
        shown += ["", style(neutral(f"from {labels[0]} to {one.label}"), "bold")]
        shown += [style(neutral(f"  {one.note}"), "yellow")] if one.note else []
        if one.text:
            shown += [_diff_line(line) for line in one.text.rstrip("\n").split("\n")]
        elif not one.note:
            shown.append("  both ran the same files")
    return shown


def _about(letter: str, side: Side) -> str:
    attempt = side.attempt
    patches = " + ".join(attempt["patches"]) or "base"
    parts = [
        f"attempt {attempt['attempt']} on {side.host}",
        patches,
        f"{attempt['profile']}, {attempt['state']}",
        f"engine {attempt['version']}" if attempt["version"] else "",
        f"bench {side.record.bench}" if side.record else "no bench",
    ]
    return neutral(f"{letter}  {side.label}: {', '.join(part for part in parts if part)}")


def _levels(letters: Sequence[str], result: Comparison) -> list[str]:
    """The table by concurrency; the columns of one kind stand together."""
    first = letters[0]
    header = ["C", *(f"tok/s {letter}" for letter in letters), *(f"{letter}/{first}" for letter in letters[1:])]
    columns: list[tuple[str, Callable[[Level], str]]] = [
        ("TTFT", lambda level: number(level.ttft_ms.p50)),
        ("TPOT", lambda level: number(level.tpot_ms.p50, 2)),
    ]
    if any(level and level.accept_length is not None for row in result.rows for level in row.levels):
        columns.append(("accept", lambda level: number(level.accept_length, 2)))
    for name, _ in columns:
        header += [f"{name} {letter}" for letter in letters]
    cells = []
    for row in result.rows:
        line = [str(row.concurrency), *(_throughput(row, place) for place in range(len(letters)))]
        line += ["-" if ratio is None else f"{ratio:.2f}x" for ratio in row.ratios[1:]]
        for _, text in columns:
            line += [text(level) if level and level.good else "-" for level in row.levels]
        cells.append(line)
    partial: dict[str, list[str]] = {}
    for concurrency, labels in measured_by_some(result.sides).items():
        partial.setdefault(", ".join(labels), []).append(f"C={concurrency}")
    only = [style(neutral(f"only {who} at {', '.join(levels)}"), "yellow") for who, levels in partial.items()]
    caption = "tok/s: output tokens per second, all requests; TTFT and TPOT: median in ms; *: the highest"
    return [*table(cells, header), style(caption, "dim"), *only]


def _throughput(row: Row, place: int) -> str:
    level: Level | None = row.levels[place]
    if level is None:
        return "-"
    if not level.good:
        return "failed"
    return number(level.output_tok_per_s) + ("*" if row.best == place else "")


def bars(result: Comparison) -> list[str]:
    """Throughput by concurrency as bars on one scale from zero."""
    smooth = coloured(sys.stdout) and "utf" in (sys.stdout.encoding or "").lower()
    labels = [neutral(side.label) for side in result.sides]
    name_width = max(len(label) for label in labels)
    place_width = max(len(f"C={row.concurrency}") for row in result.rows)
    room = shutil.get_terminal_size((100, 24)).columns - name_width - place_width - 14
    width = min(_MOST_BAR, max(_LEAST_BAR, room))
    speeds = [level.output_tok_per_s or 0.0 for row in result.rows for level in row.levels if level and level.good]
    highest = max(speeds, default=0.0)
    shown = []
    for row in result.rows:
        head = f"C={row.concurrency}"
        for place, level in enumerate(row.levels):
            if level is None:
                continue
            speed = level.output_tok_per_s if level.good else None
            bar = _bar(speed / highest * width, smooth=smooth) if speed and highest else ""
            text = number(speed) if level.good else "failed"
            line = f"{head.ljust(place_width)}  {labels[place].ljust(name_width)}  "
            shown.append(
                line + style(bar, *(["green"] if row.best == place else ["dim"])) + (" " if bar else "") + text
            )
            head = ""
    return shown


def _bar(length: float, *, smooth: bool) -> str:
    """A bar of so many characters; the shortest is still seen."""
    if not smooth:
        return "#" * max(1, round(length))
    whole, eighths = divmod(max(1, round(length * 8)), 8)
    return "█" * whole + (_EIGHTHS[eighths] if eighths else "")


def _diff_line(line: str) -> str:
    colour = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1])
    if line.startswith(("diff ", "+++", "---")):
        return style(neutral(line), "bold")
    return style(neutral(line), colour) if colour else neutral(line)
