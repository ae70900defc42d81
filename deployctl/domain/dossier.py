"""What hosts tell of their attempts, as a report needs it: which attempts are meant, and what came of each. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deployctl.errors import UsageError

_RANGE = re.compile(r"(\d+)-(\d+)")
_EXAMPLE = "for example --attempts 3,5-9 or --attempts t5_v3,gpu-1:7"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One entry of `--attempts`: numbers from `first` to `last`, or a log tag; of one host where it names one."""

    text: str
    host: str | None = None
    first: int | None = None
    last: int | None = None
    log_tag: str | None = None

    def means(self, host: str, attempt: Mapping[str, Any]) -> bool:
        """Whether an attempt of a host is meant: digits mean a number as well as a tag that looks like one."""
        if self.host is not None and self.host != host:
            return False
        if self.first is not None and self.last is not None and self.first <= attempt["attempt"] <= self.last:
            return True
        return self.log_tag is not None and attempt["log_tag"] == self.log_tag


def parse_wanted(text: str) -> tuple[Wanted, ...]:
    """The entries of `3,5-9,t5_v3,gpu-1:7`.

    Raises:
        UsageError: An entry is empty, or a range runs backwards.
    """
    found = []
    for word in (part.strip() for part in text.split(",")):
        host, colon, rest = word.rpartition(":")
        name = rest if colon else word
        if not name or (colon and not host):
            raise UsageError(f"--attempts {text!r}: {word!r} names no attempt", hint=_EXAMPLE)
        span = _RANGE.fullmatch(name)
        first = last = None
        if span:
            first, last = int(span[1]), int(span[2])
            if first > last:
                raise UsageError(f"--attempts {text!r}: {name} runs backwards", hint=f"{last}-{first}")
        elif name.isascii() and name.isdigit():
            first = last = int(name)
        found.append(Wanted(text=word, host=host if colon else None, first=first, last=last, log_tag=name))
    return tuple(found)


def chosen(dossiers: Mapping[str, Mapping[str, Any]], wanted: Sequence[Wanted] | None) -> dict[str, Mapping[str, Any]]:
    """The dossiers with the wanted attempts alone and the releases that these ran; all of them for None.

    Args:
        dossiers: By host name.
        wanted: Entries of `--attempts`.

    Raises:
        UsageError: An entry means no attempt on any of the hosts; it lists what there is.
    """
    if wanted is None:
        return dict(dossiers)
    for entry in wanted:
        if not any(entry.means(host, one) for host, told in dossiers.items() for one in told["attempts"]):
            raise UsageError(f"--attempts: there is no attempt {entry.text}", hint=_known(dossiers))
    found: dict[str, Mapping[str, Any]] = {}
    for host, told in dossiers.items():
        attempts = [one for one in told["attempts"] if any(entry.means(host, one) for entry in wanted)]
        trees = {one["tree"] for one in attempts}
        releases = [one for one in told["releases"] if one["tree"] in trees]
        found[host] = {**told, "attempts": attempts, "releases": releases}
    return found


def _known(dossiers: Mapping[str, Mapping[str, Any]]) -> str:
    several = len(dossiers) > 1
    lists = []
    for host, told in dossiers.items():
        named = [f"{one['attempt']} ({one['log_tag']})" for one in told["attempts"][-8:]]
        older = len(told["attempts"]) - len(named)
        more = f" and {older} older" if older else ""
        lists.append((f"{host}: " if several else "") + (", ".join(named) or "none") + more)
    return "attempts: " + "; ".join(lists)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of an attempt: a few words, and their kind (good, bad, doubtful, open)."""

    words: str
    kind: str


def verdict_of(attempt: Mapping[str, Any]) -> Verdict:
    """The verdict of an attempt: a server that was stopped keeps what it had come to before."""
    state = attempt["state"]
    served = attempt.get("ready_seconds") is not None
    failed = bool((attempt.get("smoke") or {}).get("problem"))
    if state == "crashed":
        return Verdict(words="crashed serving" if served else "crashed loading", kind="bad")
    if failed:
        return Verdict(words="smoke failed", kind="doubtful")
    if state == "stopped":
        return Verdict(words="served", kind="good") if served else Verdict(words="stopped loading", kind="open")
    return {
        "ready": Verdict(words="ready", kind="good"),
        "smoke_failed": Verdict(words="smoke failed", kind="doubtful"),
        "timeout": Verdict(words="not ready in time", kind="doubtful"),
        "loading": Verdict(words="loading", kind="open"),
    }.get(state, Verdict(words="unknown", kind="open"))
