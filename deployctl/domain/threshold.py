"""Up to how many requests at once speculation pays, from attempts with and without it. Pure.

With speculation a server is faster while few requests run, and slower once they keep the GPU busy. Where the patches of
dynamic_spec are applied it does without above a threshold. Which one is right depends on model, draft, hardware and
load, so it is measured: a server that speculates always against one that never does.
"""

import itertools
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from deployctl.domain.attempt import relaunch_tag
from deployctl.domain.bench import is_even
from deployctl.domain.compare import Side
from deployctl.domain.differences import options_of

FLAG = "--speculative-disable-batch-threshold"
RESUME_FLAG = "--speculative-resume-batch-threshold"
THRESHOLD, ALWAYS, NEVER = "threshold", "always", "never"

_SERIES = "dynamic_spec"
# Which shipped patch gives an engine the flag, and whether it has the second one as well.
_PATCHES = (
    (SpecifierSet(">=0.5.9,<0.5.13", prereleases=True), f"{_SERIES}/v4", True),
    (SpecifierSet(">=0.5.14,<0.5.24", prereleases=True), f"{_SERIES}/v5", False),
)
# Those that the flag is for.
_ALGORITHMS = ("EAGLE", "EAGLE3")
# A load that hovers around the threshold would switch at every step: once off, an eighth less brings speculation back.
_HYSTERESIS = 8


@dataclass(frozen=True, slots=True)
class Point:
    """One concurrency: throughput with speculation over that without it, and of which attempt the latter is."""

    concurrency: int
    ratio: float
    against: str


@dataclass(frozen=True, slots=True)
class WhileOff:
    """Throughput of an attempt where it is switched off over that of one without speculation: from and to."""

    attempt: str
    against: str
    lowest: float
    highest: float

    @property
    def sentence(self) -> str:
        """For people."""
        ratios = dict.fromkeys(f"{ratio:.2f}x" for ratio in (self.lowest, self.highest))
        return f"where {self.attempt} is off it reaches {' to '.join(ratios)} of {self.against}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to do with speculation.

    Attributes:
        speculative: Label of the attempt that speculates.
        verdict: "threshold", "always" (it pays wherever it was measured), or "never" (it pays nowhere there).
        limit: The most requests that should decode together with speculation; None unless a threshold is advised.
        resume: Once off, speculation comes back at so many; None where the engine's patch has no such flag.
        flags: Arguments of the server that say so.
        points: What that follows from.
        reason: In a sentence.
        while_off: What is left of a server without speculation where it is switched off, if both were measured.
        warnings: What makes it less certain.
        next_command: What to type next, if anything.
    """

    speculative: str
    verdict: str
    limit: int | None = None
    resume: int | None = None
    flags: tuple[str, ...] = ()
    points: tuple[Point, ...] = ()
    reason: str
    while_off: WhileOff | None = None
    warnings: tuple[str, ...] = ()
    next_command: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Its part of a comparison's JSON, the warnings left to the comparison's own."""
        return {
            "attempt": self.speculative,
            "verdict": self.verdict,
            "limit": self.limit,
            "resume": self.resume,
            "flags": list(self.flags),
            "levels": [
                {"concurrency": point.concurrency, "ratio": point.ratio, "against": point.against}
                for point in self.points
            ],
            "reason": self.reason,
            "while_off": None if self.while_off is None else asdict(self.while_off),
            "next": self.next_command,
        }


def resume_of(limit: int) -> int:
    """At how many requests speculation should come back once it is off: below the limit, where there is room."""
    return max(1, limit - max(1, limit // _HYSTERESIS))


def best_prefix(ratios: Sequence[float]) -> int:
    """How many of the first levels to speculate in.

    Every level weighs the same, by the logarithm of its ratio. For curves that cross once these are the levels before
    the crossing; where noise makes them cross more often it is the single threshold that loses least. Of several that
    are as good the lowest is taken.

    Args:
        ratios: Throughput with speculation over that without it, by ascending concurrency.
    """
    sums = [0.0, *itertools.accumulate(math.log(ratio) for ratio in ratios)]
    return sums.index(max(sums))


def crossing_after(points: Sequence[Point], count: int) -> float:
    """Where the lead is gone between the last of the first `count` points and the next, on logarithmic axes."""
    here, there = points[count - 1], points[count]
    lead, lag = math.log(here.ratio), -math.log(there.ratio)
    left, right = math.log(here.concurrency), math.log(there.concurrency)
    return math.exp(left + (right - left) * lead / (lead + lag))


def advise(sides: Sequence[Side]) -> Advice | None:
    """Whether and up to how many requests at once to speculate.

    None unless exactly one of the attempts speculates with EAGLE, or does so longer than the others, and shares a level
    with one that does not speculate there and was asked the same. An attempt that is switched off at a level goes
    before one that has no speculation at all: it is what the flag will give, costs of being able to come back included.
    """
    reaches = {place: _reach(side) for place, side in enumerate(sides) if side.record}
    most = max(reaches.values(), default=0.0)
    longest = [place for place, reach in reaches.items() if reach == most]
    if not most or len(longest) != 1 or sides[longest[0]].attempt["engine"] != "sglang":
        return None
    chosen = sides[longest[0]]
    others = [
        (sides[place], reach)
        for place, reach in reaches.items()
        if place != longest[0] and _same_texts(chosen, sides[place])
    ]
    points, queued = _points(chosen, most, others)
    if not points or _said(chosen, "speculative_algorithm") not in _ALGORITHMS:
        return None
    used = [side for side, _ in others if side.label in {point.against for point in points}]
    warnings = _warnings(chosen, [side for side, _ in others], used, queued)
    count = best_prefix([point.ratio for point in points])
    if not any(point.ratio > 1 and not is_even(point.ratio) for point in points[:count]):
        return _never(chosen, points, warnings)
    if not any(point.ratio < 1 and not is_even(point.ratio) for point in points[count:]):
        return _always(chosen, points, most, others, warnings)
    return _threshold(chosen, others, points, count, warnings)


# -- who speculates ----------------------------------------------------------------------------------------------------


def _said(side: Side, name: str) -> Any:
    """A setting as the server told it, else as its command line did; None where neither does."""
    told = side.record.settings.get(name) if side.record else None
    if told is None:
        told = options_of(side.attempt["argv"])[1].get(name.replace("_", "-"))
    return told


def _reach(side: Side) -> float:
    """Up to how many requests at once it speculates: 0 never, infinity always."""
    if not _said(side, "speculative_algorithm"):
        return 0
    limit = _number(_said(side, FLAG[2:].replace("-", "_")))
    return math.inf if limit is None else limit


def _same_texts(one: Side, other: Side) -> bool:
    """Whether both were asked to continue the same prompts for as long: what is accepted depends on the text."""

    def asked(side: Side) -> tuple[Any, ...]:
        load = side.record.load if side.record else {}
        return (load.get("prompts") or {}).get("sha256"), load.get("max_tokens")

    return asked(one) == asked(other)


def _number(value: Any) -> int | None:
    """A whole number as JSON or a command line has it."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        return None
    try:
        return int(value)
    except ValueError:
        return None


def _most_at_once(side: Side) -> float:
    most = _number(_said(side, "max_running_requests"))
    return math.inf if most is None else most


def _has_overlap(side: Side) -> bool | None:
    told = _said(side, "disable_overlap_schedule")
    return None if told is None else not told


# -- what was measured -------------------------------------------------------------------------------------------------


def _points(chosen: Side, reach: float, others: Sequence[tuple[Side, float]]) -> tuple[list[Point], dict[str, int]]:
    """The levels at which `chosen` speculates and another one does not; and who could not run so many at once.

    A level above what a server runs at once measures its queue, and says nothing of a batch of that size.
    """
    assert chosen.record is not None
    found: list[Point] = []
    queued: dict[str, int] = {}
    for concurrency, level in sorted(chosen.record.measured.items()):
        if concurrency > reach or not level.output_tok_per_s:
            continue
        pairs = [
            (side, other.output_tok_per_s)
            for side, its_reach in others
            if its_reach < concurrency
            and side.record is not None
            and (other := side.record.measured.get(concurrency))
            and other.output_tok_per_s
        ]
        if not pairs:
            continue
        if concurrency > _most_at_once(chosen):
            queued.setdefault(chosen.label, concurrency)
            continue
        able = [(side, speed) for side, speed in pairs if concurrency <= _most_at_once(side)]
        for side, _ in pairs:
            if concurrency > _most_at_once(side):
                queued.setdefault(side.label, concurrency)
        if able:
            side, speed = min(able, key=lambda pair: _rank(chosen, pair[0]))
            found.append(Point(concurrency, level.output_tok_per_s / speed, side.label))
    return found, queued


def _while_off(chosen: Side, limit: int, others: Sequence[tuple[Side, float]]) -> WhileOff | None:
    """What is left of a server without speculation, at the levels above the limit."""
    plain = [side for side, _ in others if not _said(side, "speculative_algorithm")]
    dynamic = [(side, reach) for side, reach in others if _said(side, "speculative_algorithm")]
    for side, reach in dynamic:
        for base in sorted(plain, key=lambda one: _rank(chosen, one)):
            assert side.record is not None
            assert base.record is not None
            ratios = [
                level.output_tok_per_s / other.output_tok_per_s
                for concurrency, level in side.record.measured.items()
                if max(limit, reach) < concurrency <= min(_most_at_once(side), _most_at_once(base))
                and (other := base.record.measured.get(concurrency))
                and level.output_tok_per_s
                and other.output_tok_per_s
            ]
            if ratios:
                return WhileOff(side.label, base.label, min(ratios), max(ratios))
    return None


def _faster_without(chosen: Side, points: Sequence[Point], others: Sequence[tuple[Side, float]]) -> str:
    """Where a server without any speculation beats the one that speculates: a sentence, or nothing.

    Being faster than a server that merely switches it off is no reason to speculate.
    """
    assert chosen.record is not None
    plain = [side for side, _ in others if not _said(side, "speculative_algorithm")]
    for base in sorted(plain, key=lambda one: _rank(chosen, one)):
        assert base.record is not None
        ratios = {
            point.concurrency: other.output_tok_per_s / own
            for point in points
            if (own := chosen.record.measured[point.concurrency].output_tok_per_s)
            and (other := base.record.measured.get(point.concurrency))
            and other.output_tok_per_s
            and point.concurrency <= _most_at_once(base)
        }
        ahead = {level: ratio for level, ratio in ratios.items() if ratio > 1 and not is_even(ratio)}
        if ahead:
            most = max(ahead, key=lambda level: ahead[level])
            levels = ", ".join(f"C={level}" for level in ahead)
            where = "at each of these levels" if len(ahead) == len(ratios) else f"at {levels}"
            return f"but {base.label}, without speculation, is faster {where}: {ahead[most]:.2f}x at C={most}"
    return ""


def _rank(chosen: Side, side: Side) -> tuple[bool, bool]:
    """Which of those without speculation to compare with: switched off before none, and with the same scheduler."""
    overlaps = {_has_overlap(chosen), _has_overlap(side)} - {None}
    return not _said(side, "speculative_algorithm"), len(overlaps) > 1


def _warnings(chosen: Side, others: Sequence[Side], used: Sequence[Side], queued: Mapping[str, int]) -> list[str]:
    found = [
        f"threshold: {label} does not run {concurrency} requests at once: levels from C={concurrency} on measure its"
        " queue and do not count"
        for label, concurrency in queued.items()
    ]
    if "max-running-requests" not in options_of(chosen.attempt["argv"])[1]:
        found.append(
            f"threshold: {chosen.label} was started without --max-running-requests, which the engine makes 48 under"
            " speculation: a threshold of 48 or more never acts, and levels above 48 are not like for like; set it in"
            " every attempt"
        )
    if not any(_said(side, "speculative_algorithm") for side in used):
        found.append(
            f"threshold: {_names(used)} has no speculation at all; a server that only switches it off is slower than"
            " that, so the right threshold is higher: measure one that is switched off throughout, too, as"
            " playbooks/find-threshold.yaml does"
        )
    if _has_overlap(chosen) is False:
        quicker = [side for side in others if _has_overlap(side) and not _said(side, "speculative_algorithm")]
        if quicker:
            found.append(
                f"threshold: {chosen.label} runs without the overlap scheduler, also where speculation is off (EAGLE's"
                f" v1 worker, which a top-k above 1 needs, forces it off); {_names(quicker)} runs with it: a fair"
                " baseline has --disable-overlap-schedule"
            )
    size = _number(_said(chosen, "dp_size")) or 1
    if size > 1:
        found.append(
            f"threshold: each of the {size} schedulers of {chosen.label} (data parallel) counts the batch of its own;"
            " requests are taken to be spread evenly"
        )
    return found


def _names(sides: Sequence[Side]) -> str:
    return " and ".join(side.label for side in sides)


# -- what follows ------------------------------------------------------------------------------------------------------


def _at(point: Point) -> str:
    return f"{point.ratio:.2f}x of {point.against} at C={point.concurrency}"


def _never(chosen: Side, points: Sequence[Point], warnings: Sequence[str]) -> Advice:
    best = max(points, key=lambda point: point.ratio)
    lowest = points[0].concurrency
    reason = f"speculation ({chosen.label}) pays at no concurrency from C={lowest} on: {_at(best)} at best"
    if lowest == 1:
        reason += "; serve without it"
    else:
        reason += "; fewer requests at once were not measured"
    return Advice(
        speculative=chosen.label, verdict=NEVER, points=tuple(points), reason=reason, warnings=tuple(warnings)
    )


def _always(
    chosen: Side,
    points: Sequence[Point],
    reach: float,
    others: Sequence[tuple[Side, float]],
    warnings: Sequence[str],
) -> Advice:
    highest = points[-1]
    reason = f"speculation ({chosen.label}) pays, or costs nothing, up to C={highest.concurrency}: {_at(highest)}"
    if reach < math.inf:
        reason += f"; above {int(reach)} it is off in {chosen.label}: the threshold may be higher"
    elif highest.concurrency < _most_at_once(chosen):
        reason += "; more requests at once were not measured"
    else:
        reason += "; more do not run at once: it needs no threshold"
    without = _faster_without(chosen, points, others)
    reason += f"; {without}" if without else ""
    return Advice(
        speculative=chosen.label, verdict=ALWAYS, points=tuple(points), reason=reason, warnings=tuple(warnings)
    )


def _threshold(
    chosen: Side, others: Sequence[tuple[Side, float]], points: Sequence[Point], count: int, warnings: Sequence[str]
) -> Advice:
    last, first = points[count - 1], points[count]
    # The crossing is rounded down, but never out of the interval: exp(log(x)) may be a little less than x.
    at = min(max(math.floor(crossing_after(points, count)), last.concurrency), first.concurrency - 1)
    limit = max(1, at // (_number(_said(chosen, "dp_size")) or 1))
    version = _version_of(chosen)
    patch, has_resume = next(
        ((patch, resume) for versions, patch, resume in _PATCHES if version and versions.contains(version)),
        (None, True),
    )
    resume = resume_of(limit) if has_resume else None
    flags = [FLAG, str(limit)] + ([] if resume is None else [RESUME_FLAG, str(resume)])
    command = _next_command(chosen, [chosen, *(side for side, _ in others)], patch, flags)
    found = list(warnings)
    if version and version >= Version("0.5.14"):
        found.append(
            "threshold: this engine rounds a batch up to a captured CUDA graph size before it decides: only a threshold"
            " that is such a size acts exactly there"
        )
    if command is None:
        found.append(f"threshold: no shipped patch gives engine {version or 'of unknown version'} {FLAG}")
    reason = f"speculation ({chosen.label}) pays up to about {at} requests at once: {_at(last)}, {_at(first)}"
    while_off = _while_off(chosen, at, others)
    said = [reason, while_off.sentence if while_off else "", _faster_without(chosen, points[:count], others)]
    return Advice(
        speculative=chosen.label,
        verdict=THRESHOLD,
        limit=limit,
        resume=resume,
        flags=tuple(flags),
        points=tuple(points),
        reason="; ".join(filter(None, said)),
        while_off=while_off,
        warnings=tuple(found),
        next_command=command,
    )


def _version_of(side: Side) -> Version | None:
    told = side.record.settings.get("engine_version") if side.record else None
    try:
        return Version(str(told or side.attempt["version"]))
    except InvalidVersion:
        return None


def _next_command(chosen: Side, sides: Sequence[Side], patch: str | None, flags: Sequence[str]) -> str | None:
    """How to serve with the threshold: the patch first, unless a server has taken the flag with the same patches.

    What the attempt was started with beyond its profile is not known here, but for the bound that matters: given twice
    it is the same.
    """
    attempt, where = chosen.attempt, f" --host {shlex.quote(chosen.host)}"
    taken = any(
        side.attempt["patches"] == attempt["patches"] and math.isfinite(_reach(side))
        for side in sides
        if _said(side, "speculative_algorithm")
    )
    launch = f"deployctl launch{where} --profile {attempt['profile']} --log-tag {relaunch_tag(attempt['log_tag'], [])}"
    most = options_of(attempt["argv"])[1].get("max-running-requests")
    bound = [] if most is None else ["--max-running-requests", most]
    launch += f" --replace -- {shlex.join([*bound, *flags])}"
    if taken or (patch is not None and patch in attempt["patches"]):
        return launch
    return None if patch is None else f"deployctl push{where} --patch {patch} && {launch}"
