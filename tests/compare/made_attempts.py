"""Attempts and benches as a host tells of them, made for tests of pure code."""

from deployctl.domain.bench import Record
from deployctl.domain.compare import sides_of


def level(concurrency, speed, *, sent=16, completed=None, ttft=30.0, tpot=7.0, accept=None, problem=None):
    return {
        "concurrency": concurrency,
        "sent": sent,
        "completed": sent if completed is None else completed,
        "errors": [],
        "problem": problem,
        "duration_s": 2.0,
        "output_tok_per_s": speed,
        "requests_per_s": 3.0,
        "ttft_ms": {"mean": ttft, "p50": ttft, "p90": ttft, "p99": ttft},
        "tpot_ms": {"mean": tpot, "p50": tpot, "p90": tpot, "p99": tpot},
        "itl_ms": None,
        "e2e_ms": {},
        "accept_length": accept,
    }


def bench(speeds, number=1, *, started="2026-01-01T10:00:00Z", state="complete", load=None, settings=None, **changes):
    """A record's JSON; `speeds` is {concurrency: tokens per second} or a list of levels."""
    levels = [level(c, speed) for c, speed in speeds.items()] if isinstance(speeds, dict) else speeds
    return {
        "bench": number,
        "attempt": 1,
        "log_tag": "t",
        "started": started,
        "ended": None,
        "by": "ann@example.org",
        "state": state,
        "generator": {"name": "sglang.bench_serving", "version": "0.5.12"},
        "load": {
            "levels": [one["concurrency"] for one in levels],
            "prompts": {"name": "coding", "sha256": "aa", "count": 64},
            "max_tokens": 256,
            "requests_per_level": None,
            "seed": 1,
            **(load or {}),
        },
        "settings": {"engine": "sglang", "engine_version": "0.5.12", "gpus": ["NVIDIA H200"], **(settings or {})},
        "levels": levels,
        "crash": None,
        "warnings": [],
        **changes,
    }


def record(speeds, number=1, **changes):
    return Record.decode(bench(speeds, number, **changes))


def attempt(number=1, tag="t", *benches, **changes):
    """An attempt of a dossier."""
    return {
        "attempt": number,
        "log_tag": tag,
        "profile": "eagle3",
        "engine": "sglang",
        "release": None,
        "base": 1,
        "tree": "0@1",
        "version": "0.5.12",
        "patches": [],
        "at": "2026-01-01T09:00:00Z",
        "by": "ann@example.org",
        "argv": ["/env/bin/python", "-m", "sglang.launch_server", "--port", "30000"],
        "env": {},
        "state": "stopped",
        "phases": [{"name": "init", "seconds": 3.0}, {"name": "weights", "seconds": 60.0}],
        "ready_seconds": 90.0,
        "smoke": {"ok": True},
        "crash": None,
        "ended": None,
        "port": 30000,
        "rank": 0,
        "nodes": 1,
        "log": "/logs/a.log",
        "benches": list(benches),
        **changes,
    }


def sides(*attempts, hosts=None, gpus=("NVIDIA H200",)):
    """Sides of attempts, all on one host unless `hosts` names one for each."""
    hosts = hosts or ["gpu-1"] * len(attempts)
    return sides_of([(host, one, gpus) for host, one in zip(hosts, attempts, strict=True)])
