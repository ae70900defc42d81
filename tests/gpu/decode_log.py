"""What the server's log says: decode steps, switches of speculation, and signs of trouble. Pure but for `Log`."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_STEP = re.compile(
    r"Decode batch(?: \[\d+\])?, #running-req: (?P<running>\d+), #token: (?P<tokens>\d+),.*?"
    r"(?:accept len: (?P<accept>[\d.]+), accept rate: [\d.]+, )?"
    r"(?P<backend>[a-z ]*graph): (?P<graph>\w+), gen throughput \(token/s\): (?P<speed>[\d.]+)"
)
_SWITCH = re.compile(r"\[dynspec\] speculation (ON|OFF)\b")
_LEAK = re.compile(r"(?:memory|pool)[^\n]{0,40} leak|leak detected", re.IGNORECASE)
_RETRACTED = re.compile(r"#retracted_reqs: (\d+)")
_READY = re.compile(r"\[dynspec\] ready: .*")


class Step(NamedTuple):
    """One `Decode batch` line: the mean over the steps since the last one."""

    running: int
    tokens: int  # in the KV cache
    accept_length: float | None  # None without a draft model
    cuda_graph: bool
    tokens_per_s: float


def steps(text: str) -> list[Step]:
    """All decode lines of a log."""
    return [
        Step(
            int(found["running"]),
            int(found["tokens"]),
            float(found["accept"]) if found["accept"] else None,
            found["graph"] == "True",
            float(found["speed"]),
        )
        for found in _STEP.finditer(text)
    ]


def switches(text: str) -> list[str]:
    """The switches in order, each ON or OFF."""
    return _SWITCH.findall(text)


def leak_lines(text: str) -> list[str]:
    """Lines in which the engine complains of lost KV slots."""
    return [line[:300] for line in text.splitlines() if _LEAK.search(line)]


def retractions(text: str) -> int:
    """How many requests were taken out of the batch for lack of memory, or because a test asked for it."""
    return sum(int(count) for count in _RETRACTED.findall(text))


def ready_line(text: str) -> str | None:
    """What the patch says when its second set is built."""
    found = _READY.search(text)
    return found.group(0)[:600] if found else None


def median(values: Sequence[float]) -> float | None:
    """The upper median, or None."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else None


def mean(values: Sequence[float]) -> float | None:
    """The mean, or None."""
    return sum(values) / len(values) if values else None


def summary(found: Sequence[Step], running: int) -> dict:
    """Of the lines with exactly so many requests, or of all where there is none."""
    chosen = [step for step in found if step.running == running] or list(found)
    lengths = [step.accept_length for step in chosen if step.accept_length is not None]
    return {
        "lines": len(chosen),
        "tokens_per_s": median([step.tokens_per_s for step in chosen]),
        "accept_length": median(lengths),
        "without_cuda_graph": sum(1 for step in chosen if not step.cuda_graph),
    }


class Log:
    """A log that is being written.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def mark(self) -> int:
        """Where it ends now."""
        return self.path.stat().st_size

    def since(self, mark: int = 0, until: int | None = None) -> str:
        """Its text from a mark on."""
        with self.path.open("rb") as source:
            source.seek(mark)
            content = source.read() if until is None else source.read(until - mark)
        return content.decode("utf-8", "replace").replace("\r", "\n")

    def tail(self, most_bytes: int) -> str:
        """Its end."""
        return self.since(max(0, self.mark() - most_bytes))
