"""A bench as values: what is asked of one, what one has measured, and when two of them may be compared. Pure."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployctl.domain.prompts import PromptSet, load_prompts
from deployctl.errors import UsageError

DEFAULT_SWEEP = (1, 2, 4, 8, 16, 32, 64)
DEFAULT_PROMPTS = "coding"
DEFAULT_MAX_TOKENS = 256
DEFAULT_SEED = 1
DEFAULT_TIMEOUT_S = 600.0
LEAST_TOKENS = 4
MOST_CONCURRENCY = 4096
MOST_REQUESTS = 100_000
MOST_SEED = 2**32 - 1
MOST_LEVELS = 64
# Throughputs that differ by less are called even.
_EVEN = 0.03


# -- what is asked -----------------------------------------------------------------------------------------------------


def parse_sweep(text: str) -> tuple[int, ...]:
    """The concurrencies of `1,2,4,8`, in their order.

    Playbooks may say `true` for those that are usual.

    Raises:
        UsageError: Not numbers from 1 to 4096, one of them twice, or none.
    """
    example = "for example --sweep 1,2,4,8,16,32,64"
    levels: list[int] = []
    if text == "true":
        return DEFAULT_SWEEP
    for word in text.split(","):
        number = word.strip()
        if not (number.isascii() and number.isdigit()) or not 1 <= int(number) <= MOST_CONCURRENCY:
            raise UsageError(f"sweep {text!r}: {number!r} is not a number from 1 to {MOST_CONCURRENCY}", hint=example)
        if int(number) in levels:
            raise UsageError(f"sweep {text!r}: {number} stands there twice", hint=example)
        levels.append(int(number))
    if len(levels) > MOST_LEVELS:
        raise UsageError(f"a sweep of {len(levels)} levels: {MOST_LEVELS} at most", hint=example)
    return tuple(levels)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """A bench that is asked for, checked.

    Attributes:
        levels: Concurrencies, in the order in which they are measured.
        prompts: What is sent.
        max_tokens: Tokens of every answer.
        requests_per_level: None for 4 for each place, 16 at least.
        timeout_s: Of each level.
    """

    levels: tuple[int, ...] = DEFAULT_SWEEP
    prompts: PromptSet
    max_tokens: int = DEFAULT_MAX_TOKENS
    requests_per_level: int | None = None
    seed: int = DEFAULT_SEED
    timeout_s: float = DEFAULT_TIMEOUT_S

    def as_request(self) -> dict[str, Any]:
        """The agent's arguments, without the attempt."""
        return {
            "levels": list(self.levels),
            "prompts": self.prompts.as_request(),
            "max_tokens": self.max_tokens,
            "requests_per_level": self.requests_per_level,
            "seed": self.seed,
            "timeout_s": self.timeout_s,
        }


def request_of(
    *,
    sweep: str | Sequence[int] | None = None,
    prompts: str | None = None,
    root: Path,
    max_tokens: int | None = None,
    requests_per_level: int | None = None,
    seed: int | None = None,
    timeout_s: float | None = None,
) -> BenchRequest:
    """A checked request from what the command line or a playbook says; None stands for the default.

    Raises:
        UsageError, ConfigError: Something of it is wrong.
    """

    def within(value: int | None, least: int, most: int, name: str) -> None:
        if value is not None and not least <= value <= most:
            raise UsageError(f"{name} is {value}: {least} to {most} can be measured", hint="deployctl bench --help")

    within(max_tokens, LEAST_TOKENS, MOST_REQUESTS, "--max-tokens")
    within(requests_per_level, 1, MOST_REQUESTS, "--requests-per-level")
    within(seed, 0, MOST_SEED, "--seed")
    if timeout_s is not None and timeout_s <= 0:
        raise UsageError("--timeout must be longer than that", hint="--timeout 10m")
    if isinstance(sweep, str):
        sweep = parse_sweep(sweep)
    levels = DEFAULT_SWEEP if sweep is None else tuple(sweep)
    if requests_per_level is not None and requests_per_level < max(levels):
        raise UsageError(
            f"{requests_per_level} requests are never {max(levels)} at once",
            hint=f"--requests-per-level {max(levels)} or more, or a smaller sweep",
        )
    return BenchRequest(
        levels=levels,
        prompts=load_prompts(prompts or DEFAULT_PROMPTS, root),
        max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
        requests_per_level=requests_per_level,
        seed=DEFAULT_SEED if seed is None else seed,
        timeout_s=DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s,
    )


# -- what was measured -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of a time in milliseconds; None where it is not known."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None

    @classmethod
    def decode(cls, value: Any) -> "Spread":
        """From the record."""
        entries = value if isinstance(value, Mapping) else {}
        return cls(**{name: _number(entries.get(name)) for name in ("mean", "p50", "p90", "p99")})


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One concurrency of a bench."""

    concurrency: int
    sent: int
    completed: int
    errors: tuple[str, ...] = ()
    problem: str | None = None
    duration_s: float | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None
    output_tok_per_s: float | None = None
    requests_per_s: float | None = None
    ttft_ms: Spread = field(default_factory=Spread)
    tpot_ms: Spread = field(default_factory=Spread)
    itl_ms: Spread = field(default_factory=Spread)
    e2e_ms: Spread = field(default_factory=Spread)
    accept_length: float | None = None

    @property
    def good(self) -> bool:
        """Whether everything that was sent came back."""
        return self.completed == self.sent and not self.problem

    @classmethod
    def decode(cls, value: Mapping[str, Any]) -> "Level":
        """From the record."""
        return cls(
            concurrency=int(value["concurrency"]),
            sent=int(value["sent"]),
            completed=int(value["completed"]),
            errors=tuple(str(error) for error in value.get("errors") or ()),
            problem=value.get("problem"),
            duration_s=_number(value.get("duration_s")),
            input_tokens=_number(value.get("input_tokens")),
            output_tokens=_number(value.get("output_tokens")),
            output_tok_per_s=_number(value.get("output_tok_per_s")),
            requests_per_s=_number(value.get("requests_per_s")),
            ttft_ms=Spread.decode(value.get("ttft_ms")),
            tpot_ms=Spread.decode(value.get("tpot_ms")),
            itl_ms=Spread.decode(value.get("itl_ms")),
            e2e_ms=Spread.decode(value.get("e2e_ms")),
            accept_length=_number(value.get("accept_length")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One bench, as the host keeps it."""

    bench: int
    attempt: int
    log_tag: str
    started: str
    ended: str | None
    by: str
    state: str
    generator: Mapping[str, Any]
    load: Mapping[str, Any]
    settings: Mapping[str, Any]
    levels: tuple[Level, ...]
    crash: Mapping[str, Any] | None = None
    warnings: tuple[str, ...] = ()

    @classmethod
    def decode(cls, value: Mapping[str, Any]) -> "Record":
        """From its JSON; fields that a later version may add are left out."""
        return cls(
            bench=int(value["bench"]),
            attempt=int(value["attempt"]),
            log_tag=str(value["log_tag"]),
            started=str(value["started"]),
            ended=value.get("ended"),
            by=str(value.get("by", "")),
            state=str(value["state"]),
            generator=dict(value.get("generator") or {}),
            load=dict(value.get("load") or {}),
            settings=dict(value.get("settings") or {}),
            levels=tuple(Level.decode(level) for level in value.get("levels") or ()),
            crash=value.get("crash"),
            warnings=tuple(str(text) for text in value.get("warnings") or ()),
        )

    @property
    def measured(self) -> dict[int, Level]:
        """The levels in which everything came back, by concurrency."""
        return {level.concurrency: level for level in self.levels if level.good}


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


# -- two of them -------------------------------------------------------------------------------------------------------

# What must be alike for the difference to be the patch's: where it stands in a record, and its name.
_ALIKE = (
    (("generator", "name"), "load generator"),
    (("load", "prompts", "sha256"), "prompts"),
    (("load", "seed"), "seed"),
    (("load", "max_tokens"), "max tokens"),
    (("load", "requests_per_level"), "requests per level"),
    (("settings", "engine"), "engine"),
    (("settings", "engine_version"), "engine version"),
    (("settings", "gpus"), "GPUs"),
    (("settings", "model_path"), "model"),
    (("settings", "quantization"), "quantization"),
    (("settings", "dtype"), "dtype"),
    (("settings", "kv_cache_dtype"), "KV cache dtype"),
    (("settings", "tp_size"), "tensor parallel size"),
    (("settings", "dp_size"), "data parallel size"),
    (("settings", "attention_backend"), "attention backend"),
    (("settings", "disable_overlap_schedule"), "overlap schedule"),
    (("settings", "disable_radix_cache"), "prefix cache"),
    (("settings", "disable_cuda_graph"), "CUDA graphs"),
    (("settings", "max_running_requests"), "max_running_requests"),
)
_INVERTED = ("disable_overlap_schedule", "disable_radix_cache", "disable_cuda_graph")


def unlike(a: Record, b: Record) -> list[str]:
    """Why two benches are not like for like: one sentence each; what either does not tell is not held against it."""
    found = []
    for path, name in _ALIKE:
        left, right = _at(a, path), _at(b, path)
        if left == right or (path[-1] != "requests_per_level" and (left is None or right is None)):
            continue
        if path[-1] == "sha256":
            left, right = _at(a, ("load", "prompts", "name")), _at(b, ("load", "prompts", "name"))
            if left == right:
                found.append(f"prompts: both are called {left}, but their texts differ")
                continue
        text = f"{name}: {_said(path[-1], left)} against {_said(path[-1], right)}"
        if path[-1] == "max_running_requests":
            text += " (48 unless set, with speculation): above the smaller one a queue is measured"
        found.append(text)
    return found


def _at(record: Record, path: Sequence[str]) -> Any:
    value: Any = getattr(record, path[0])
    for key in path[1:]:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _said(key: str, value: Any) -> str:
    if key in _INVERTED:
        return "off" if value else "on"
    if isinstance(value, list):
        counted = {name: value.count(name) for name in dict.fromkeys(value)}
        return ", ".join(f"{count} x {name}" for name, count in counted.items()) or "none"
    return "4 for each place" if value is None else str(value)


def is_even(factor: float) -> bool:
    """Whether a ratio of two throughputs is no lead: the same server measured twice differs by as much."""
    return 1 / (1 + _EVEN) < factor < 1 + _EVEN


def crossover(a: Record, b: Record, names: tuple[str, str] | None = None) -> list[str]:
    """Who is ahead in output tokens per second, and where that changes.

    Args:
        a, b: Two benches.
        names: What to call them; their log tags by default.

    Returns:
        Sentences such as "eagle wins up to C=2", "baseline wins from C=4 on, 2.18x at C=64".
    """
    left, right = names or (a.log_tag, b.log_tag)
    ratios = {
        concurrency: level.output_tok_per_s / other.output_tok_per_s
        for concurrency, level in sorted(a.measured.items())
        if (other := b.measured.get(concurrency)) and level.output_tok_per_s and other.output_tok_per_s
    }
    if not ratios:
        return ["no concurrency was measured in both"]

    def ahead(concurrency: int) -> str:
        if is_even(ratios[concurrency]):
            return ""
        return left if ratios[concurrency] > 1 else right

    runs = [(winner, list(group)) for winner, group in itertools.groupby(ratios, key=ahead)]
    sentences = []
    for place, (winner, levels) in enumerate(runs):
        if len(runs) == 1:
            where = "at every concurrency" if len(levels) > 1 else f"at C={levels[0]}"
        elif place == 0:
            where = f"up to C={levels[-1]}"
        elif place == len(runs) - 1:
            where = f"from C={levels[0]} on"
        else:
            where = f"from C={levels[0]} to {levels[-1]}" if len(levels) > 1 else f"at C={levels[0]}"
        if not winner:
            sentences.append(f"{left} and {right} are even {where}")
            continue
        # The level that tells most: where the lead is largest.
        factors = {level: max(ratios[level], 1 / ratios[level]) for level in levels}
        best = max(factors, key=lambda level: factors[level])
        sentences.append(f"{winner} wins {where}, {factors[best]:.2f}x at C={best}")
    return sentences
