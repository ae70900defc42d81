"""Measures a running server level by level with a load generator, and keeps what was measured whatever happens.

attempts/<n>/bench/lock                     one bench of an attempt at a time
attempts/<n>/bench/<b>/bench.json           the record, rewritten after every level
attempts/<n>/bench/<b>/raw-c<C>.jsonl       the generator's own result of a level (guidellm: .json)
attempts/<n>/bench/<b>/generator-c<C>.log   what it printed
attempts/<n>/bench/<b>/prompts.jsonl        the prompts as they are sent (`loadgen_render`)
"""

import contextlib
import fcntl
import json
import os
import time

from . import attempts, audit, bench_levels, loadgen, lock, smoke, watch
from .failure import (
    EXIT_CRASHED,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_LOCKED,
    EXIT_SMOKE,
    EXIT_USAGE,
    Cancelled,
    Failure,
)
from .state import disk_failure

RUNNING, COMPLETE, FAILED, CRASHED, CANCELLED = "running", "complete", "failed", "crashed", "cancelled"
_MOST_LEVELS, _MOST_CONCURRENCY, _MOST_REQUESTS = 64, 4096, 100000
# An agent that lost its client notices within `wire.CLIENT_SILENCE_S`, and ends its generator.
_RESUME_PATIENCE_S = 75.0


def bench(context):
    """Run the levels of a load against the server of an attempt, in their order; see the client's `domain.bench`.

    Raises:
        Failure: The request is wrong (exit 2), the server does not serve (2, 5, 6), another bench runs (4), the
            generator is not there, or the disk is full. Levels that were measured before stay in the record.
    """
    lock.reading(context)
    load = _checked(context.args)
    try:
        attempt = smoke.running(context)
    except Failure:
        # A bench that goes on after a lost link may find its server dead: its levels and the crash are wanted then.
        if context.args.get("resume") is None or context.args.get("attempt") is None:
            raise
        attempt = attempts.choose(context.state, context.args["attempt"])
    if not attempts.is_here(attempt):
        raise Failure("attempt %d runs on %s" % (attempt["attempt"], attempt.get("node")), kind="other-machine")
    prompts = _prompts(context.wire.blobs.get("prompts", b""))
    with _only_bench(context, attempt):
        sweep = _Sweep(context, attempt, load, prompts)
        try:
            result = sweep.run()
        except Failure as failure:
            result = sweep.failed(failure)
    for key in ("attempt", "log_tag", "log", "profile", "release", "patches", "port"):
        result[key] = attempt[key]
    result["bench"] = sweep.record
    result.setdefault("crash", sweep.record["crash"])
    audit.record(context, result)
    return result


def _checked(args):
    """The load of a request.

    Raises:
        Failure: exit 2.
    """
    levels = args.get("levels") or []
    load = {
        "levels": levels,
        "prompts": args.get("prompts") or {},
        "max_tokens": args.get("max_tokens"),
        "requests_per_level": args.get("requests_per_level"),
        "seed": args.get("seed", 1),
    }
    problem = ""
    if not levels or len(levels) > _MOST_LEVELS or len(set(levels)) != len(levels):
        problem = "1 to %d different levels are needed, not %r" % (_MOST_LEVELS, levels)
    elif not all(isinstance(level, int) and 1 <= level <= _MOST_CONCURRENCY for level in levels):
        problem = "levels are numbers from 1 to %d, not %r" % (_MOST_CONCURRENCY, levels)
    elif not isinstance(load["max_tokens"], int) or load["max_tokens"] < loadgen.LEAST_TOKENS:
        problem = "max_tokens must be %d or more" % loadgen.LEAST_TOKENS
    elif load["requests_per_level"] is not None and not 1 <= load["requests_per_level"] <= _MOST_REQUESTS:
        problem = "requests_per_level must be 1 to %d" % _MOST_REQUESTS
    elif load["requests_per_level"] is not None and load["requests_per_level"] < max(levels):
        problem = "%d requests are never %d at once" % (load["requests_per_level"], max(levels))
    elif not 0 <= load["seed"] < 1 << 32:
        problem = "a seed is a number from 0 to %d" % ((1 << 32) - 1)
    if problem:
        raise Failure(problem, kind="usage", hint="deployctl bench --help", exit_code=EXIT_USAGE)
    return load


def _prompts(blob):
    """[[{"role", "content"}]] of the JSONL that the client has checked."""
    found = []
    for line in blob.decode("utf-8").splitlines():
        if line.strip():
            entry = json.loads(line)
            found.append(entry.get("messages") or [{"role": "user", "content": entry["prompt"]}])
    if not found:
        raise Failure("no prompts came with the request", kind="usage", exit_code=EXIT_USAGE)
    return found


@contextlib.contextmanager
def _only_bench(context, attempt):
    """One bench of an attempt at a time: two would measure each other. The kernel lets go when its holder dies.

    A command that comes back after a lost link waits for its own agent, which has yet to notice.
    """
    folder = context.state.path("attempts", attempt["attempt"], "bench")
    path = os.path.join(folder, "lock")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise disk_failure(error, path) from error
    try:
        finish = time.monotonic() + _RESUME_PATIENCE_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = _read_holder(handle)
                mine = bool(holder.get("token")) and holder["token"] == context.args.get("token")
                if mine and time.monotonic() < finish and not context.wire.cancelled.is_set():
                    time.sleep(0.1)
                    continue
                raise Failure(
                    "%s measures attempt %d already" % (holder.get("operator") or "somebody", attempt["attempt"]),
                    kind="bench-running",
                    hint="wait for its end: two benches at once measure each other",
                    exit_code=EXIT_LOCKED,
                ) from None
            except OSError:
                break  # a file system without locks
        os.ftruncate(handle, 0)
        signed = {"operator": context.operator, "token": context.args.get("token")}
        os.pwrite(handle, json.dumps(signed).encode("ascii"), 0)
        yield
    finally:
        os.close(handle)


def _read_holder(handle):
    try:
        found = json.loads(os.pread(handle, 4096, 0).decode("utf-8"))
    except ValueError:
        return {}  # it is just signing
    return found if isinstance(found, dict) else {}


def _now():
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class _Sweep:
    """One bench from its first level to its verdict."""

    def __init__(self, context, attempt, load, prompts):
        self._context = context
        self._attempt = attempt
        number, record = self._earlier()
        self.record = record or {
            "bench": number,
            "attempt": attempt["attempt"],
            "log_tag": attempt["log_tag"],
            "started": _now(),
            "ended": None,
            "by": context.operator,
            "token": context.args.get("token"),
            "state": RUNNING,
            "generator": {"name": None, "version": None},
            "load": load,
            "settings": {},
            "levels": [],
            "crash": None,
            "warnings": [],
        }
        self._load = self.record["load"]
        self._folder = context.state.path("attempts", attempt["attempt"], "bench", number)
        self._levels = bench_levels.Levels(context, attempt, self._load, prompts, self._folder)
        self.record["generator"]["name"] = self._levels.generator.name

    def _earlier(self):
        """(number, record) of the bench to go on with, else the next number and None."""
        folder = self._context.state.path("attempts", self._attempt["attempt"], "bench")
        numbers = sorted(int(name) for name in os.listdir(folder) if name.isdigit())
        wanted, token = self._context.args.get("resume"), self._context.args.get("token")
        for number in reversed(numbers):
            record = self._context.state.read_json("attempts", self._attempt["attempt"], "bench", number, "bench.json")
            if record is None:
                continue
            same = bool(token) and record.get("token") == token if wanted is None else number == wanted
            if same:
                return number, record
        if wanted is not None:
            raise Failure("attempt %d has no bench %s" % (self._attempt["attempt"], wanted), exit_code=EXIT_USAGE)
        return (numbers[-1] if numbers else 0) + 1, None

    # -- the whole ---------------------------------------------------------------------------------------------------

    def run(self):
        """Measure the levels that are not there yet.

        Returns:
            The host's result.
        """
        done = [level["concurrency"] for level in self.record["levels"]]
        missing = [level for level in self._load["levels"] if level not in done]
        self._context.wire.event(
            "bench",
            bench=self.record["bench"],
            attempt=self._attempt["attempt"],
            log_tag=self._attempt["log_tag"],
            levels=self._load["levels"],
            done=done,
            folder=self._folder,
        )
        if not missing:
            return self._verdict()
        if self._levels.server_is_gone():
            return self._died()
        self.record.update(state=RUNNING, ended=None)
        self.record["generator"]["version"], warnings = self._levels.prepare()
        self.record["settings"] = self._levels.settings
        for text in warnings:
            if text not in self.record["warnings"]:
                self.record["warnings"].append(text)
                self._context.wire.event("warning", text=text)
        self._write()
        for concurrency in missing:
            level = self._levels.run(concurrency)
            if level is None:
                return self._died()
            gives_up = level.pop("gives_up")
            self.record["levels"].append(level)
            self.record["levels"].sort(key=lambda one: self._load["levels"].index(one["concurrency"]))
            self._write()
            self._context.wire.event("level", **level)
            if gives_up:
                break  # a generator that gives no result, or a server that does not get through, would do so again
        return self._verdict()

    def _verdict(self):
        failed = [level for level in self.record["levels"] if level["state"] == "failed"]
        missing = len(self._load["levels"]) - len(self.record["levels"])
        self.record.update(state=FAILED if failed or missing else COMPLETE, ended=self.record["ended"] or _now())
        self._write()
        result = {"status": self.record["state"]}
        if failed:
            first = failed[0]
            result["exit"] = EXIT_SMOKE
            result["error"] = {
                "kind": "bench",
                "message": "level %d: %s%s"
                % (
                    first["concurrency"],
                    first["problem"],
                    "; %d further levels were not tried" % missing if missing else "",
                ),
                "hint": "on the host: %s; deployctl logs"
                % os.path.join(self._folder, "generator-c%d.log" % first["concurrency"]),
            }
        return result

    def failed(self, failure):
        """The result of a bench that was cancelled or could not go on; what was measured stays."""
        cancelled = failure.exit_code == EXIT_INTERRUPTED
        self.record.update(state=CANCELLED if cancelled else FAILED, ended=_now())
        try:
            self._write()
        except Failure:
            pass  # the disk that refused one write refuses this; what was written before is whole
        result = failure.as_result()
        result["status"] = self.record["state"]
        if cancelled:
            result["error"]["message"] = "cancelled: %d of %d levels were measured" % (
                len(self.record["levels"]),
                len(self._load["levels"]),
            )
            result["error"]["hint"] = "deployctl bench measures anew; the levels of this one are kept"
        return result

    def _died(self):
        """The server has gone, or is going, or is being stopped."""
        self._levels.watcher.settle()
        if self._context.wire.cancelled.is_set():
            raise Cancelled
        if not self._levels.watcher.ended:
            self.record.update(state=FAILED, ended=_now())
            self._write()
            return self._was_stopped("by %s" % (self._levels.stopped_by or "somebody"))
        verdict = watch.conclude_death(self._context, self._attempt, self._levels.watcher)
        crashed = verdict["exit"] == EXIT_CRASHED
        self.record.update(state=CRASHED if crashed else FAILED, ended=_now(), crash=verdict.get("crash"))
        self._write()
        if not crashed:
            return self._was_stopped(verdict["error"]["message"])
        return {
            "status": CRASHED,
            "exit": EXIT_CRASHED,
            "crash": verdict["crash"],
            "error": verdict["error"],
            "phases": verdict["phases"],
            "ready_seconds": verdict["ready_seconds"],
        }

    def _was_stopped(self, why):
        return {
            "status": FAILED,
            "exit": EXIT_FAILED,
            "error": {
                "kind": "stopped",
                "message": "the server was stopped during the bench (%s)" % why,
                "hint": "deployctl launch --log-tag TAG, then deployctl bench",
            },
        }

    def _write(self):
        self._context.state.write_json(
            self.record, "attempts", self._attempt["attempt"], "bench", self.record["bench"], "bench.json"
        )
