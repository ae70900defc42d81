"""What benches of one load say together: who is ahead at which concurrency. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from deployctl.domain.bench import Record, crossover, is_even


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One attempt's bench under the name that the report gives it; `baseline` where it ran no patch."""

    name: str
    record: Record
    baseline: bool = False

    @property
    def curve(self) -> dict[int, float]:
        """Output tokens per second by concurrency, where all requests came back."""
        return {
            concurrency: level.output_tok_per_s
            for concurrency, level in sorted(self.record.measured.items())
            if level.output_tok_per_s
        }


def headline(entries: Sequence[Entry]) -> tuple[list[str], list[Entry]]:
    """The sentences to say first, and the entries that they are about, most important first.

    One attempt that nobody beats anywhere is named with what it gains on the others; two that share the lead are told
    by their crossover; more are named with the concurrencies at which each leads.

    Args:
        entries: Benches of one load, oldest first.
    """
    measured = [entry for entry in entries if entry.curve]
    if not measured:
        return [], []
    if len(measured) == 1:
        return [_alone(measured[0])], measured
    best = _best(measured)
    unbeaten = [entry for entry in measured if _never_behind(entry, best)]
    if unbeaten:
        # Of several that are even the baseline, which needs no patch, else the newest.
        winner = next((entry for entry in unbeaten if entry.baseline), unbeaten[-1])
        return _of_winner(winner, [entry for entry in measured if entry is not winner])
    leaders = _leaders(measured)
    names = list(dict.fromkeys(leaders.values()))
    by_name = {entry.name: entry for entry in measured}
    if len(names) == 2:
        first, second = (by_name[name] for name in names)
        return crossover(first.record, second.record, (first.name, second.name)), [first, second]
    sentences = []
    for place, name in enumerate(names):
        levels = [concurrency for concurrency, leader in leaders.items() if leader == name]
        peak = by_name[name].curve[levels[-1]]
        verb = "leads " if place == 0 else ""
        sentences.append(f"{name} {verb}at C={_levels(levels)} ({_thousands(peak)} tok/s at C={levels[-1]})")
    return sentences, [by_name[name] for name in names]


def best_by_concurrency(entries: Sequence[Entry]) -> dict[int, str]:
    """{concurrency: name of whoever has the highest throughput there}."""
    best = _best([entry for entry in entries if entry.curve])
    return {concurrency: entry.name for concurrency, (_, entry) in best.items()}


def _best(entries: Sequence[Entry]) -> dict[int, tuple[float, Entry]]:
    best: dict[int, tuple[float, Entry]] = {}
    for entry in entries:
        for concurrency, throughput in entry.curve.items():
            if concurrency not in best or throughput > best[concurrency][0]:
                best[concurrency] = (throughput, entry)
    return dict(sorted(best.items()))


def _never_behind(entry: Entry, best: dict[int, tuple[float, Entry]]) -> bool:
    curve = entry.curve
    ratios = [curve.get(level, 0.0) / throughput for level, (throughput, _) in best.items()]
    return all(ratio >= 1 or is_even(ratio) for ratio in ratios)


def _leaders(entries: Sequence[Entry]) -> dict[int, str]:
    """Who leads where; a lead within the noise does not change hands."""
    curves = {entry.name: entry.curve for entry in entries}
    leaders: dict[int, str] = {}
    current = ""
    for concurrency, (throughput, entry) in _best(entries).items():
        if not current or not is_even(curves[current].get(concurrency, 0.0) / throughput):
            current = entry.name
        leaders[concurrency] = current
    return leaders


def _of_winner(winner: Entry, others: Sequence[Entry]) -> tuple[list[str], list[Entry]]:
    curve = winner.curve
    gains = {other.name: _gain(curve, other.curve) for other in others}
    behind = [other for other in others if gains[other.name][0] > 1 and not is_even(gains[other.name][0])]
    # What it gains is told against whoever would lead without it: they are the choice that one has.
    rivals = list(dict.fromkeys(_leaders(behind).values()))[:2]
    by_name = {entry.name: entry for entry in others}
    where = "at every concurrency" if len(curve) > 1 else f"at C={next(iter(curve))}"
    if not rivals:
        return [f"{winner.name} and the others are even {where}"], [winner, *others[-2:]]
    told = []
    for name in rivals:
        factor, level = gains[name]
        told.append(f"{factor:.2f}x {name} at C={level}")
    even = any(curve.get(level, 0.0) < throughput for level, (throughput, _) in _best([winner, *others]).items())
    verb = "leads or is even" if even else "leads"
    return [f"{winner.name} {verb} {where}: {', '.join(told)}"], [winner, *(by_name[name] for name in rivals)]


def _gain(curve: dict[int, float], other: dict[int, float]) -> tuple[float, int]:
    """(largest ratio, where) of two curves; (0, 0) without a common concurrency."""
    ratios = {level: curve[level] / other[level] for level in curve if level in other}
    return max(((ratio, level) for level, ratio in ratios.items()), default=(0.0, 0))


def _alone(entry: Entry) -> str:
    curve = entry.curve
    first, last = min(curve), max(curve)
    ends = [first] if first == last else [first, last]
    return f"{entry.name}: " + ", ".join(f"{_thousands(curve[level])} tok/s at C={level}" for level in ends)


def _levels(levels: Sequence[int]) -> str:
    return str(levels[0]) if len(levels) == 1 else f"{levels[0]}-{levels[-1]}"


def _thousands(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\u202f") if value >= 100 else f"{value:.1f}"
