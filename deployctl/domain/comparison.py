"""A whole comparison as one value: for the table on a terminal, for `--json`, and for `--csv`. Pure."""

import csv
import io
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deployctl.domain import compare, threshold
from deployctl.domain.attempt import relaunch_tag
from deployctl.domain.bench import Level
from deployctl.domain.compare import Row, Side
from deployctl.domain.differences import Difference, differences, phases

_LIVE = ("loading", "ready", "smoke_failed", "timeout")
_SPREADS = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
_STATISTICS = ("mean", "p50", "p90", "p99")
_COUNTS = ("sent", "completed", "duration_s", "input_tokens", "output_tokens", "output_tok_per_s", "requests_per_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchDiff:
    """From what the first side ran to what another one ran; `text` is empty where both ran the same files."""

    label: str
    text: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two or more attempts, side by side; the first is what the others are compared with."""

    sides: tuple[Side, ...]
    rows: tuple[Row, ...]
    headlines: tuple[str, ...]
    differences: tuple[Difference, ...]
    phases: tuple[tuple[str, tuple[float | None, ...]], ...]
    warnings: tuple[str, ...]
    next_commands: tuple[str, ...]
    advice: threshold.Advice | None = None
    patch_diffs: tuple[PatchDiff, ...] | None = None

    def as_json(self) -> dict[str, Any]:
        """What the one object of `--json` carries beside its hosts."""
        labels = [side.label for side in self.sides]
        value: dict[str, Any] = {
            "attempts": [_side(side) for side in self.sides],
            "levels": [
                {
                    "concurrency": row.concurrency,
                    "attempts": {
                        label: None if level is None else {**asdict(level), "good": level.good, "ratio": ratio}
                        for label, level, ratio in zip(labels, row.levels, row.ratios, strict=True)
                    },
                    "best": None if row.best is None else labels[row.best],
                }
                for row in self.rows
            ],
            "measured_only_by": [
                {"concurrency": concurrency, "attempts": by}
                for concurrency, by in compare.measured_by_some(self.sides).items()
            ],
            "crossover": [
                {
                    "attempt": side.label,
                    "against": labels[0],
                    "concurrencies": [round(at, 2) for at in compare.crossings(self.sides[0].record, side.record)],
                }
                for side in self.sides[1:]
                if self.sides[0].record and side.record
            ],
            "headlines": list(self.headlines),
            "threshold": None if self.advice is None else self.advice.as_json(),
            "differences": [
                {"kind": one.kind, "name": one.name, "values": dict(zip(labels, one.values, strict=True))}
                for one in self.differences
            ],
            "phases": [
                {"name": name, "seconds": dict(zip(labels, seconds, strict=True))} for name, seconds in self.phases
            ],
            "warnings": list(self.warnings),
            "next": list(self.next_commands),
        }
        if self.patch_diffs is not None:
            value["patch_diffs"] = [
                {"attempt": one.label, "against": labels[0], "diff": one.text, "note": one.note or None}
                for one in self.patch_diffs
            ]
        return value

    def as_csv(self) -> str:
        """A tidy table: a line for each attempt and concurrency, a column for each number, empty where not known."""
        columns = ["host", "attempt", "log_tag", "release", "patches", "bench", "concurrency", *_COUNTS]
        columns += [f"{name}_{statistic}" for name in _SPREADS for statistic in _STATISTICS]
        columns += ["accept_length", "ratio"]
        text = io.StringIO()
        out = csv.writer(text, lineterminator="\n")
        out.writerow(columns)
        for place, side in enumerate(self.sides):
            for row in self.rows:
                level = row.levels[place]
                if level is None or side.record is None:
                    continue
                attempt = side.attempt
                about = [side.host, attempt["attempt"], attempt["log_tag"], attempt["release"] or 0]
                about += [" + ".join(attempt["patches"]), side.record.bench, row.concurrency]
                out.writerow([*about, *_numbers(level), row.ratios[place]])
        return text.getvalue()


def _numbers(level: Level) -> list[float | None]:
    found: list[float | None] = [getattr(level, name) for name in _COUNTS]
    for name in _SPREADS:
        spread = getattr(level, name)
        found += [getattr(spread, statistic) for statistic in _STATISTICS]
    return [*found, level.accept_length]


def _side(side: Side) -> dict[str, Any]:
    attempt = side.attempt
    keys = ("attempt", "log_tag", "profile", "release", "patches", "version", "state", "at", "by", "ready_seconds")
    record = side.record
    return {
        "label": side.label,
        "host": side.host,
        **{key: attempt[key] for key in keys},
        "gpus": list(side.gpus),
        "bench": None
        if record is None
        else {
            "bench": record.bench,
            "started": record.started,
            "state": record.state,
            "generator": dict(record.generator),
            "load": dict(record.load),
            "settings": dict(record.settings),
        },
        "note": side.note or None,
    }


def comparison(sides: Sequence[Side], patch_diffs: Sequence[PatchDiff] | None = None) -> Comparison:
    """Everything that can be said of the sides."""
    records = [side.record for side in sides]
    advice = threshold.advise(sides)
    return Comparison(
        sides=tuple(sides),
        rows=compare.rows(records),
        headlines=tuple(compare.headlines(sides)),
        differences=tuple(differences(sides)),
        phases=tuple(phases(sides)),
        warnings=(*compare.warnings(sides), *(advice.warnings if advice else ())),
        next_commands=tuple(_next_command(side) for side in sides if side.record is None),
        advice=advice,
        patch_diffs=None if patch_diffs is None else tuple(patch_diffs),
    )


def _next_command(side: Side) -> str:
    """How to measure an attempt that has no bench: as it runs, or by starting the like of it again."""
    attempt = side.attempt
    where = f" --host {shlex.quote(side.host)}"
    if attempt["state"] in _LIVE:
        return f"deployctl bench{where} --attempt {attempt['attempt']}"
    tag = relaunch_tag(attempt["log_tag"], [])
    launch = f"deployctl launch{where} --profile {attempt['profile']} --log-tag {tag} --replace --bench"
    to = attempt["release"] or "base"
    return f"deployctl rollback{where} --to {to} && {launch}"


def contents_of(told: Mapping[str, Any], side: Side) -> Mapping[str, str | None] | None:
    """The files of what a side ran, from its host's dossier; None where nothing was ever stored of it."""
    tree = side.attempt["tree"]
    found: Mapping[str, str | None] | None = (told.get("contents") or {}).get(tree) if tree else None
    return found
