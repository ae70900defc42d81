"""A bench as text: a bar while a level runs, a line when it is through, a table at the end."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from deployctl.domain.bench import Level, Record
from deployctl.render.terminal import duration, neutral, style, table

_HEADER = ["C", "tok/s", "req/s", "TTFT p50", "p99", "TPOT p50", "p99", "accept", "answered"]


def number(value: float | None, digits: int = 1) -> str:
    """A number for a table; `-` where it is not known. Above a thousand no digits after the point."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.{digits}f}"


def row(level: Level) -> list[str]:
    """A level's line of the table."""
    return [
        str(level.concurrency),
        number(level.output_tok_per_s),
        number(level.requests_per_s, 2),
        number(level.ttft_ms.p50),
        number(level.ttft_ms.p99),
        number(level.tpot_ms.p50, 2),
        number(level.tpot_ms.p99, 2),
        number(level.accept_length, 2),
        f"{level.completed}/{level.sent}" + ("" if level.good else " FAILED"),
    ]


def lines(value: Mapping[str, Any]) -> list[str]:
    """The table of a record (its JSON), with what must be known to read it."""
    record = Record.decode(value)
    generator = " ".join(str(part) for part in (record.generator.get("name"), record.generator.get("version")) if part)
    load = record.load
    prompts = load.get("prompts") or {}
    sent = f"prompts {prompts.get('name')} ({prompts.get('count')}), {load.get('max_tokens')} tokens each"
    head = (
        f"bench {record.bench} of attempt {record.attempt} ({record.log_tag}): {generator}, {sent},"
        f" seed {load.get('seed')}"
    )
    shown = [neutral(f"  {head}")]
    if record.levels:
        shown += [f"  {line}" for line in table([row(level) for level in record.levels], _HEADER)]
        shown.append(style("  tok/s: output tokens per second, all requests; TTFT and TPOT in ms", "dim"))
    for level in record.levels:
        for error in level.errors:
            shown.append(style(neutral(f"  C={level.concurrency}: {error}"), "yellow"))
    missing = [
        str(one) for one in load.get("levels") or [] if one not in [level.concurrency for level in record.levels]
    ]
    if missing:
        shown.append(style(f"  not measured: {', '.join(missing)}", "yellow"))
    for warning in record.warnings:
        shown.append(style(neutral(f"  warning: {warning}"), "yellow"))
    return shown


def said(event: Mapping[str, Any]) -> str:
    """A level that is through, in one line."""
    level = Level.decode(event)
    if not level.good:
        return f"C={level.concurrency}: {level.problem}"
    text = (
        f"C={level.concurrency}: {number(level.output_tok_per_s)} tok/s, TTFT {number(level.ttft_ms.p50)} ms,"
        f" TPOT {number(level.tpot_ms.p50, 2)} ms"
    )
    return text + (f", accept length {level.accept_length:.2f}" if level.accept_length else "")


class Sweep:
    """One host's bench while it runs: what the bar shows."""

    def __init__(self, levels: Sequence[int], done: Sequence[int]) -> None:
        self.began = time.monotonic()
        self._levels = list(levels)
        self._done = len(done)
        self._current: Mapping[str, Any] = {}

    def level(self, event: Mapping[str, Any]) -> None:
        """Take an event of a level."""
        self._current = event
        if event["state"] in ("done", "failed"):
            self._done += 1

    def fraction(self) -> float:
        """Of the level that runs."""
        sent = self._current.get("sent") or 0
        return min(1.0, self._current.get("completed", 0) / sent) if sent else 0.0

    def describe(self) -> str:
        """The text beside the bar."""
        if not self._current:
            return f"bench: getting ready  {duration(time.monotonic() - self.began)}"
        place = min(len(self._levels), self._done + (self._current["state"] in ("start", "progress")))
        return (
            f"C={self._current['concurrency']}  {self._current.get('completed', 0)}/{self._current['sent']}"
            f"  level {place} of {len(self._levels)}  {duration(time.monotonic() - self.began)}"
        )
