"""Attempts side by side: which benches are set against each other, and who is ahead where. Pure.

The first attempt is what the others are compared with.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deployctl.domain.attempt import check_log_tag
from deployctl.domain.bench import Level, Record, crossover, is_even, unlike
from deployctl.errors import UsageError

_EXAMPLE = "deployctl compare t0_base t1_eagle, or: deployctl compare 3 gpu-2:7"
COMPLETE = "complete"


# -- which attempts ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Name:
    """How an attempt is named on the command line: its number or log tag, and its host where that stands before it."""

    text: str
    host: str | None
    name: str


def parse_names(words: Sequence[str], *, hosts: bool = True) -> tuple[Name, ...]:
    """The attempts of `3 t1_eagle gpu-2:7`.

    Args:
        words: As typed.
        hosts: Whether a host may stand before a name.

    Raises:
        UsageError: Fewer than two, one of them twice, or something that names no attempt.
    """
    found = []
    for word in words:
        host, colon, name = word.rpartition(":")
        if not name or (colon and (not host or not hosts)):
            raise UsageError(f"{word!r} names no attempt", hint=_EXAMPLE)
        check_log_tag(name)
        found.append(Name(word, host if colon else None, name))
    if len(found) < 2:
        raise UsageError("a comparison needs two attempts", hint=_EXAMPLE)
    for one, other in itertools.combinations(found, 2):
        if one == other:
            raise UsageError(f"{one.text} stands there twice", hint=_EXAMPLE)
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One attempt of a comparison.

    Attributes:
        host: Name of its host.
        label: What it is called: its log tag, with host or number where that alone does not tell it apart.
        attempt: As the host's dossier tells of it.
        gpus: Names of the host's GPUs now.
        record: The bench that is compared, or None where none has measured anything.
        note: Why it is this bench, where that is worth a word.
    """

    host: str
    label: str
    attempt: Mapping[str, Any]
    gpus: tuple[str, ...]
    record: Record | None
    note: str = ""


def sides_of(told: Sequence[tuple[str, Mapping[str, Any], Sequence[str]]]) -> tuple[Side, ...]:
    """The sides of a comparison, each with its bench.

    Args:
        told: For each attempt its host's name, the attempt of the dossier, and the host's GPUs.
    """
    names = labels([(host, attempt) for host, attempt, _ in told])
    benches = choose_benches([[Record.decode(one) for one in attempt["benches"]] for _, attempt, _ in told])
    return tuple(
        Side(host=host, label=label, attempt=attempt, gpus=tuple(gpus), record=record, note=note)
        for (host, attempt, gpus), label, (record, note) in zip(told, names, benches, strict=True)
    )


def labels(told: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """What to call each attempt of (host, attempt): its log tag, with host or number where that alone does not tell."""
    tags = [str(attempt["log_tag"]) for _, attempt in told]
    pairs = [(host, tag) for (host, _), tag in zip(told, tags, strict=True)]
    found = []
    for (host, attempt), tag in zip(told, tags, strict=True):
        label = tag
        if tags.count(tag) > 1:
            label = f"{host}:{tag}" if len({where for where, other in pairs if other == tag}) > 1 else tag
            if pairs.count((host, tag)) > 1:
                label += f"({attempt['attempt']})"
        found.append(label)
    return found


# -- which benches -----------------------------------------------------------------------------------------------------


def load_of(record: Record) -> tuple[Any, ...]:
    """What was sent, as far as it decides the numbers: two benches of one load can be compared level by level."""
    load = record.load
    prompts = (load.get("prompts") or {}).get("sha256")
    return (record.generator.get("name"), prompts, *(load.get(k) for k in ("max_tokens", "requests_per_level", "seed")))


def choose_benches(told: Sequence[Sequence[Record]]) -> list[tuple[Record | None, str]]:
    """For each attempt the bench to compare, and why where it is not simply its newest complete one.

    Complete benches go before others, of which the levels so far count, and those before benches in which no level
    counts: that requests failed is told, and not that nothing was measured. Where the newest ones had different loads,
    the newest of a load that all were measured with are taken.

    Args:
        told: The benches of each attempt, oldest first.
    """
    pools = []
    for records in told:
        measured = [record for record in records if record.measured] or [record for record in records if record.levels]
        pools.append([record for record in measured if record.state == COMPLETE] or measured)
    newest = [pool[-1] if pool else None for pool in pools]
    chosen = list(newest)
    filled = [pool for pool in pools if pool]
    if len({load_of(record) for record in newest if record}) > 1:
        by_load = [{load_of(record): record for record in pool} for pool in filled]
        common = [load for load in by_load[0] if all(load in benches for benches in by_load)]
        if common:
            load = max(common, key=lambda one: min(benches[one].started for benches in by_load))
            chosen = [next((r for r in reversed(pool) if load_of(r) == load), None) for pool in pools]
    return [(record, _note(record, last)) for record, last in zip(chosen, newest, strict=True)]


def _note(record: Record | None, newest: Record | None) -> str:
    if record is None or newest is None:
        return ""
    if record.bench != newest.bench:
        return (
            f"bench {record.bench} instead of its newest one, {newest.bench}, which had another load:"
            " this load all of them were measured with"
        )
    if record.state != COMPLETE:
        return f"bench {record.bench} is not complete ({record.state}): its levels so far"
    return ""


# -- who is ahead ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One concurrency: each side's level (None where it was not measured), and throughput against the first side's."""

    concurrency: int
    levels: tuple[Level | None, ...]
    ratios: tuple[float | None, ...]

    @property
    def best(self) -> int | None:
        """Which side has the highest throughput; None where only one was measured, or the first two are even."""
        order = sorted(
            ((level.output_tok_per_s or 0.0, place) for place, level in enumerate(self.levels) if level and level.good),
            reverse=True,
        )
        if len(order) < 2 or not order[1][0] or is_even(order[0][0] / order[1][0]):
            return None
        return order[0][1]


def rows(records: Sequence[Record | None]) -> tuple[Row, ...]:
    """Every concurrency that any of them has, ascending."""
    told = [{level.concurrency: level for level in record.levels} if record else {} for record in records]
    found = []
    for concurrency in sorted({one for levels in told for one in levels}):
        levels = tuple(one.get(concurrency) for one in told)
        speeds = [level.output_tok_per_s if level and level.good else None for level in levels]
        first = speeds[0]
        found.append(Row(concurrency, levels, tuple(speed / first if speed and first else None for speed in speeds)))
    return tuple(found)


def crossings(a: Record, b: Record) -> list[float]:
    """The concurrencies at which the throughput curves cross, ascending.

    Between two levels both curves are taken as straight on logarithmic axes, on which throughput bends least.
    """
    points = []
    for concurrency, level in sorted(a.measured.items()):
        other = b.measured.get(concurrency)
        if other and level.output_tok_per_s and other.output_tok_per_s:
            points.append((math.log(concurrency), math.log(level.output_tok_per_s / other.output_tok_per_s)))
    apart = [(place, lead) for place, lead in points if lead]
    found = []
    for (left, lead), (right, other_lead) in itertools.pairwise(apart):
        if (lead > 0) == (other_lead > 0):
            continue
        # Where they are equal at a level in between, that is where they cross.
        equal = [place for place, here in points if not here and left < place < right]
        if equal:
            found.append(math.exp(sum(equal) / len(equal)))
        else:
            found.append(math.exp(left + (right - left) * lead / (lead - other_lead)))
    return found


def headlines(sides: Sequence[Side]) -> list[str]:
    """In sentences, each side against the first: who is ahead, where that changes, and where the curves cross.

    Of more than two, each sentence begins with its pair.
    """
    first = sides[0]
    found = []
    for side in sides[1:]:
        if first.record is None or side.record is None:
            continue
        text = "; ".join(crossover(first.record, side.record, (first.label, side.label)))
        at = [f"C={concurrency:.1f}".removesuffix(".0") for concurrency in crossings(first.record, side.record)]
        if at:
            text += f"; the curves cross near {' and '.join(at)}"
        found.append(f"{side.label} against {first.label}: {text}" if len(sides) > 2 else text)
    return found


def warnings(sides: Sequence[Side]) -> list[str]:
    """What keeps the comparison from being like for like, and what each bench itself warned of."""
    found = [f"{side.label}: {side.note}" for side in sides if side.note]
    first = sides[0]
    for side in sides[1:]:
        if first.record is None or side.record is None:
            continue
        prefix = f"{side.label} against {first.label}: " if len(sides) > 2 else ""
        found += [f"not like for like: {prefix}{text}" for text in unlike(first.record, side.record)]
    for side in sides:
        if side.record is None:
            continue
        for level in side.record.levels:
            if not level.good:
                why = level.problem or f"{level.completed} of {level.sent} answered"
                found.append(f"{side.label}: C={level.concurrency} does not count: {why}")
    own: dict[str, list[str]] = {}
    for side in sides:
        for text in side.record.warnings if side.record else ():
            own.setdefault(text, []).append(side.label)
    return found + [f"{', '.join(dict.fromkeys(labels))}: {text}" for text, labels in own.items()]


def measured_by_some(sides: Sequence[Side]) -> dict[int, list[str]]:
    """The concurrencies that some sides were measured at and others, though they have a bench, were not: by whom."""
    measured = {side.label: side.record.measured for side in sides if side.record}
    by_level = {
        concurrency: [label for label, levels in measured.items() if concurrency in levels]
        for concurrency in sorted({one for levels in measured.values() for one in levels})
    }
    return {concurrency: labels for concurrency, labels in by_level.items() if len(labels) < len(measured)}


# -- the better one ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decision:
    """Which side to keep: its place, which others are as good, by which concurrency, and why, in a sentence."""

    place: int
    equals: tuple[int, ...]
    concurrency: int
    reason: str


def may_serve(attempt: Mapping[str, Any]) -> bool:
    """Whether an attempt's server could be started again with a clear conscience: it was ready, and did not fail."""
    smoke = attempt.get("smoke")
    failed = attempt["state"] in ("crashed", "smoke_failed") or (smoke and not smoke["ok"])
    return attempt["ready_seconds"] is not None and not failed


def decide(sides: Sequence[Side], at: int | None = None) -> Decision:
    """The side with the highest throughput at a concurrency, of those that served without fault.

    Args:
        sides: The sides.
        at: The concurrency; the highest that was measured in all of them where None.

    Raises:
        UsageError: There is no such level in all of them, or none of them may serve.
    """
    able = [place for place, side in enumerate(sides) if may_serve(side.attempt)]
    if not able:
        raise UsageError("none of the attempts served without fault", hint="deployctl history")
    levels = set.intersection(*(set(side.record.measured) if side.record else set() for side in sides))
    if not levels or (at is not None and at not in levels):
        known = ", ".join(str(level) for level in sorted(levels))
        raise UsageError(
            f"C={at} was not measured in all of them" if at else "no concurrency was measured in all of them",
            hint=f"measured in all: {known}" if known else "deployctl bench measures the server that runs",
        )
    concurrency = max(levels) if at is None else at
    speeds = {
        place: side.record.measured[concurrency].output_tok_per_s or 0.0
        for place, side in enumerate(sides)
        if side.record and place in able
    }
    order = sorted(speeds, key=lambda place: speeds[place], reverse=True)
    best = order[0]
    if len(order) == 1:
        return Decision(best, (), concurrency, f"{sides[best].label} alone served without fault")
    factors = {place: speeds[best] / speeds[place] if speeds[place] else math.inf for place in order[1:]}
    equals = tuple(place for place, factor in factors.items() if is_even(factor))
    if equals:
        names = " and ".join(sides[place].label for place in sorted((best, *equals)))
        return Decision(best, equals, concurrency, f"{names} are even at C={concurrency}")
    second = order[1]
    lead = f"{sides[best].label} is {factors[second]:.2f}x {sides[second].label} at C={concurrency}"
    return Decision(best, (), concurrency, lead)
