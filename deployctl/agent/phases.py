"""The load phases of SGLang, read from its log by a reducer: (state, line) → (state, events).

Source of the lines: SGLang 0.5.9 to 0.5.23 as published (engine.py, model_runner.py, cuda_graph_runner.py,
http_server.py). Every rank prints its own lines: progress follows rank 0, or on a node without it whoever is first.
"""

import collections
import re

ORDER = ("init", "weights", "kv-cache", "graphs", "warm-up")

State = collections.namedtuple(
    "State", "phase since phases ready_line every_rank", defaults=("init", None, (), False, False)
)
State.__doc__ = """phase: current phase. since: when it began (seconds on the caller's clock).
phases: ((name, seconds), ...) that ended. ready_line: whether the engine said that it is ready.
every_rank: whether all ranks count (a node that has no rank 0)."""

_PREFIX = re.compile(rb"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?P<ranks>(?: [A-Z]{2}\d+)*)\] ?")
_RANK = re.compile(rb" (TP|PP|DP|EP)(\d+)")
_PERCENT = re.compile(rb"(\d{1,3})%")
_FRACTION = re.compile(rb"\| (\d+)/(\d+) \[")

_MARKS = (
    ("weights", re.compile(rb"Load weight begin|Loading safetensors|Multi-thread loading|Loading pt checkpoint")),
    ("kv-cache", re.compile(rb"Load weight end|KV Cache is allocated|Memory pool end|Post-capture KV sizing")),
    ("graphs", re.compile(rb"Capture .{0,40}graph begin|Capture (cuda )?graph bs|Capturing batches", re.IGNORECASE)),
    ("warm-up", re.compile(rb"Started server process|Application startup complete|Uvicorn running on")),
)
_PROGRESS = {
    "weights": re.compile(rb"Loading|loading shards"),
    "graphs": re.compile(rb"Capturing batches", re.IGNORECASE),
}
# Without one of these (in small letters) a line says nothing about a load.
_TELLING = (
    b"load weight", b"loading", b"kv cache is", b"memory pool end", b"kv sizing", b"graph begin", b"graph bs",
    b"capturing batches", b"started server process", b"application startup", b"uvicorn running", b"fired up",
)  # fmt: skip
_READY = re.compile(rb"The server is fired up and ready to roll!")


def rank_zero(line):
    """Whether a line is rank 0's (or has no rank)."""
    match = _PREFIX.match(line)
    if match is None:
        return True
    return all(int(number) == 0 for _, number in _RANK.findall(match.group("ranks")))


def quiet(state, block):
    """Whether lines (bytes, any number) hold nothing that advance() would learn from."""
    if state.ready_line:
        return True
    small = block.lower()
    return not any(token in small for token in _TELLING)


def advance(state, line, now):
    """Read one log line.

    Args:
        state: State.
        line: Bytes, without line end.
        now: Seconds on the caller's clock.

    Returns:
        (State, events): events are dicts `{"event": "phase", "name", "state": "start"|"progress"|"done", ...}`.
    """
    if state.since is None:
        state = state._replace(since=now)
    if _READY.search(line):
        if state.ready_line:
            return state, []
        state, events = _enter(state, "warm-up", now)
        state, done = close(state, now)
        return state._replace(ready_line=True), [*events, done]
    if state.ready_line or not (state.every_rank or rank_zero(line)):
        return state, []
    for name, pattern in _MARKS:
        if pattern.search(line):
            # Draft weights and draft graphs come after the target's: the load moves on, never back.
            if ORDER.index(name) > ORDER.index(state.phase):
                state, events = _enter(state, name, now)
                return state, events
            break
    bar = _PROGRESS.get(state.phase)
    if bar is not None and bar.search(line):
        fraction = _fraction(line)
        if fraction is not None:
            return state, [{"event": "phase", "name": state.phase, "state": "progress", "progress": fraction}]
    return state, []


def _enter(state, name, now):
    if state.phase == name:
        return state, []
    state, done = close(state, now)
    return state._replace(phase=name), [done, {"event": "phase", "name": name, "state": "start"}]


def close(state, now):
    """End the current phase, as the next one's start or the server's being ready does.

    Returns:
        (State, the `done` event).
    """
    seconds = round(now - state.since, 3)
    done = {"event": "phase", "name": state.phase, "state": "done", "seconds": seconds}
    return state._replace(since=now, phases=(*state.phases, (state.phase, seconds))), done


def _fraction(line):
    counted = _FRACTION.search(line)
    if counted and int(counted.group(2)):
        return min(1.0, int(counted.group(1)) / int(counted.group(2)))
    percent = _PERCENT.search(line)
    return min(1.0, int(percent.group(1)) / 100) if percent else None


def as_list(state):
    """The ended phases for a result: [{name, seconds}]."""
    return [{"name": name, "seconds": seconds} for name, seconds in state.phases]
