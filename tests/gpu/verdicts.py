"""What must hold: criteria over the numbers of the stages. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Sweeps = Mapping[str, Mapping[int, Sequence[float]]]  # arm -> concurrency -> tokens/s of each round

PASS, FAIL, NOT_RUN, REPORT = "PASS", "FAIL", "NOT RUN", "REPORT"

# (what, arm, against, concurrencies, floor, goal)
OFF_FLOORS = (
    ("v1-dynamic", "base-no-overlap", (32, 64), 0.95, None),
    ("v1-dynamic", "base-no-overlap", (10,), 0.90, None),
    ("v2-dynamic", "base-no-overlap", (32, 64), 0.92, 0.97),
    ("v2-dynamic", "base", (32, 64), 0.82, 0.93),
)
ON_FLOORS = (
    ("v1-dynamic", "v1", (1, 4), 0.97, None),
    ("v2-dynamic", "v2", (1, 4), 0.97, None),
)
RATIOS = (
    ("v1-dynamic", "base-no-overlap"),
    ("v1-dynamic", "v1"),
    ("v2-dynamic", "base-no-overlap"),
    ("v2-dynamic", "base"),
    ("v2-dynamic", "v2"),
)


@dataclass(frozen=True)
class Verdict:
    """One criterion and how it came out.

    Args:
        stage: Whose.
        what: The criterion in words.
        outcome: PASS, FAIL, NOT RUN, or REPORT for a number of which nothing is demanded.
        value: What was measured.
        wanted: What was wanted.
        note: Why, or a goal that is reported and not demanded.
    """

    stage: str
    what: str
    outcome: str
    value: Any = None
    wanted: str = ""
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """For results.json."""
        return asdict(self)


def judge(stage: str, what: str, value: Any, *, holds: bool | None, wanted: str = "", note: str = "") -> Verdict:
    """A verdict from a condition; None for what was not measured."""
    return Verdict(stage, what, NOT_RUN if holds is None else PASS if holds else FAIL, value, wanted, note)


def reported(stage: str, what: str, value: Any, note: str = "") -> Verdict:
    """A number of which nothing is demanded."""
    return Verdict(stage, what, NOT_RUN if value is None else REPORT, value, "", note)


def at_least(
    stage: str, what: str, value: float | None, floor: float, goal: float | None = None, spread: Sequence[float] = ()
) -> Verdict:
    """A floor, a goal above it that is only reported, and the values that `value` stands for."""
    notes = []
    if goal is not None and value is not None:
        notes.append(f"goal {goal:.2f} {'reached' if value >= goal else 'missed'}")
    if len(spread) > 1:
        notes.append(f"{min(spread):.3f} to {max(spread):.3f} in {len(spread)} rounds")
    note = ", ".join(notes)
    rounded = None if value is None else round(value, 4)
    return judge(stage, what, rounded, holds=None if value is None else value >= floor, wanted=f">= {floor}", note=note)


def at_most(stage: str, what: str, value: float | None, most: float) -> Verdict:
    """An upper bound."""
    rounded = None if value is None else round(value, 4)
    return judge(stage, what, rounded, holds=None if value is None else value <= most, wanted=f"<= {most}")


def ratio(sweeps: Sweeps, arm: str, against: str, concurrency: int) -> float | None:
    """tokens/s of one arm over another's: the median over the rounds, in each of which both were measured.

    None where no round has both. A machine that slows down for some seconds slows both arms of a round.
    """
    rounds = paired(sweeps, arm, against, concurrency)
    return statistics.median(rounds) if rounds else None


def paired(sweeps: Sweeps, arm: str, against: str, concurrency: int) -> list[float]:
    """The ratio of each round."""
    one, other = sweeps.get(arm, {}).get(concurrency, ()), sweeps.get(against, {}).get(concurrency, ())
    return [first / second for first, second in zip(one, other, strict=False) if first and second]


def ratio_rows(sweeps: Sweeps, levels: Sequence[int]) -> list[dict[str, Any]]:
    """For each concurrency: {"concurrency", "<arm> / <against>": ratio or None}."""
    return [
        {"concurrency": level} | {f"{arm} / {against}": ratio(sweeps, arm, against, level) for arm, against in RATIOS}
        for level in levels
    ]


def speed_verdicts(sweeps: Sweeps) -> list[Verdict]:
    """The floors of throughput with speculation off (above the threshold) and on (below)."""
    return [
        at_least(
            "speed",
            f"{arm} / {against} at {level}",
            ratio(sweeps, arm, against, level),
            floor,
            goal,
            spread=paired(sweeps, arm, against, level),
        )
        for arm, against, levels, floor, goal in (*OFF_FLOORS, *ON_FLOORS)
        for level in levels
    ]


def exit_status(verdicts: Sequence[Mapping[str, Any]], errors: int) -> int:
    """0: all hold. 1: one does not, or a stage failed. 3: all that ran hold, but not all ran."""
    outcomes = [verdict["outcome"] for verdict in verdicts]
    if errors or FAIL in outcomes:
        return 1
    return 3 if NOT_RUN in outcomes or not outcomes else 0


def first_difference(found: Sequence[int], wanted: Sequence[int]) -> int | None:
    """Where two outputs part, or None where they are equal (lengths included)."""
    if list(found) == list(wanted):
        return None
    for place, (one, other) in enumerate(zip(found, wanted, strict=False)):
        if one != other:
            return place
    return min(len(found), len(wanted))


def compared(found: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> dict[str, Any]:
    """{"requests", "equal", "different": [[request, place], ...]}."""
    pairs = list(zip(found, wanted, strict=False))
    different = [
        [number, place]
        for number, (one, other) in enumerate(pairs)
        if (place := first_difference(one, other)) is not None
    ]
    return {"requests": len(pairs), "equal": len(pairs) - len(different), "different": different[:20]}
