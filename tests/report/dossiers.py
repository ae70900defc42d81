"""Dossiers as hosts give them: two hosts, seven releases, over thirty attempts with crashes and benches. Invented numbers.

`story()` is one invented week of work on dynamic speculation; the same numbers come out every time.
"""

import copy
import datetime as dt
import random

from made_crashes import crash, out_of_memory
from made_patches import BASE, patched, sha, unified

START = dt.datetime(2026, 3, 2, 9, 12, tzinfo=dt.UTC)
LEVELS = (1, 2, 4, 8, 16, 32, 64)


def iso(at):
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def release(number, version, at, parent=0, parent_version=0, current=False):
    before, after = patched(parent_version), patched(version)
    return {
        "number": number,
        "tree": str(number) if number else "0@1",
        "base": 1,
        "version": "0.5.12",
        "parent": parent if number else None,
        "at": iso(at),
        "by": "mara@example.org",
        "command": f"push --patch v{version}" if number else "push",
        "current": current,
        "patches": [f"dynamic_spec/v{version}"] if version else [],
        "files": [{"path": path, "before": sha(BASE[path]), "after": sha(after[path])} for path in sorted(after)]
        if version
        else [],
        "diff": unified(before, after) if number else "",
        "diff_truncated": False,
    }


_TOKENS_PER_S = {
    "base": (96, 188, 361, 668, 1130, 1690, 2240),
    "eagle": (171, 262, 338, 402, 521, 742, 1030),
    "v4": (169, 259, 354, 655, 1108, 1652, 2196),
}


def spread(middle, dice, tail=2.1):
    return {
        "mean": middle * 1.08,
        "p50": middle,
        "p90": middle * (1 + (tail - 1) * 0.6),
        "p99": middle * tail * dice.uniform(0.95, 1.05),
    }


def level(kind, concurrency, dice, fails=0, speed=1.0):
    throughput = speed * _TOKENS_PER_S[kind][LEVELS.index(concurrency)] * dice.uniform(0.995, 1.005)
    tpot = concurrency / throughput * 1000
    ttft = (
        (34 if kind == "base" else 41) * (1 + concurrency / (14 if kind == "eagle" else 22)) * dice.uniform(0.97, 1.04)
    )
    sent = max(16, 4 * concurrency)
    good = not fails
    return {
        "concurrency": concurrency,
        "sent": sent,
        "completed": sent - fails,
        "state": "done" if good else "failed",
        "problem": None if good else f"{fails} of {sent} requests failed: HTTP 500",
        "errors": [] if good else ["HTTP 500"],
        "duration_s": sent * 256 / throughput,
        "input_tokens": sent * 310,
        "output_tokens": sent * 256,
        "output_tok_per_s": throughput,
        "requests_per_s": throughput / 256,
        "ttft_ms": spread(ttft, dice, 3.4),
        "tpot_ms": spread(tpot, dice, 1.35),
        "itl_ms": spread(tpot * (2.1 if kind != "base" else 1), dice, 2.2),
        "e2e_ms": spread(ttft + tpot * 255, dice, 1.3),
        "accept_length": round(dice.uniform(2.55, 2.8), 2)
        if kind == "eagle" or (kind == "v4" and concurrency <= 2)
        else None,
    }


def bench(
    number, attempt, tag, kind, at, gpus, *, prompts="coding", levels=LEVELS, state="complete", failing=None, seed=0
):
    dice = random.Random(f"{kind}{attempt}{prompts}{seed}")
    return {
        "bench": number,
        "attempt": attempt,
        "log_tag": tag,
        "started": iso(at),
        "ended": iso(at + dt.timedelta(minutes=6)),
        "by": "mara@example.org",
        "state": state,
        "generator": {"name": "sglang.bench_serving", "version": "0.5.12"},
        "load": {
            "levels": list(levels),
            "prompts": {"name": prompts, "sha256": sha(prompts), "count": 64},
            "max_tokens": 256,
            "requests_per_level": None,
            "seed": 1,
        },
        "settings": {
            "engine": "sglang",
            "engine_version": "0.5.12",
            "gpus": gpus,
            "max_running_requests": 256 if kind == "base" else 48,
            "disable_overlap_schedule": kind != "base",
            "speculative_algorithm": None if kind == "base" else "EAGLE3",
            "speculative_num_steps": None if kind == "base" else 3,
            "speculative_eagle_topk": None if kind == "base" else 4,
            "speculative_disable_batch_threshold": 2 if kind == "v4" else None,
            "attention_backend": "trtllm_mla",
            "tp_size": 8,
            "model_path": "/shared/kimi-k2.5-int4",
        },
        "levels": [
            level(kind, one, dice, (failing or {}).get(one, 0), 0.71 if "H200" in gpus[0] else 1.0) for one in levels
        ],
        "crash": None,
        "warnings": [],
    }


def attempt(
    number,
    tag,
    at,
    *,
    version=0,
    release_number=0,
    state="stopped",
    ready=531.0,
    minutes=40,
    kind="eagle",
    benches=(),
    crash=None,
    smoke=None,
    host="gpu-a",
):
    dice = random.Random(f"{host}{number}")
    scale = (ready or 300) / 531 * dice.uniform(0.96, 1.04)
    phases = [("init", 38), ("weights", 352), ("kv-cache", 9), ("graphs", 96), ("warm-up", 36)]
    told = [{"name": name, "seconds": round(seconds * scale, 1)} for name, seconds in phases]
    if ready is None:
        told = told[:2]
    argv = [
        "/opt/ml-env/bin/python3",
        "-m",
        "sglang.launch_server",
        "--model-path",
        "/shared/kimi-k2.5-int4",
        "--tp-size",
        "8",
        "--port",
        "30000",
    ]
    if kind != "base":
        argv += ["--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3"]
    if version:
        argv += ["--speculative-disable-batch-threshold", "2"]
    running = state in ("ready", "loading", "smoke_failed", "timeout")
    return {
        "attempt": number,
        "log_tag": tag,
        "profile": "baseline" if kind == "base" else "eagle3",
        "engine": "sglang",
        "release": release_number or None,
        "base": 1,
        "tree": str(release_number) if release_number else "0@1",
        "version": "0.5.12",
        "patches": [f"dynamic_spec/v{version}"] if version else [],
        "at": iso(at),
        "by": "mara@example.org",
        "argv": argv,
        "env": {"SGLANG_ENABLE_SPEC_V2": "0", "HF_TOKEN": "***"},
        "state": state,
        "phases": told,
        "ready_seconds": None if ready is None else round(sum(phase["seconds"] for phase in told), 1),
        "smoke": smoke
        or (
            {
                "ok": True,
                "text": " Paris. The capital of",
                "problem": None,
                "seconds": 0.4,
                "burst": {"sent": 16, "answered": 16, "failed": [], "slowest_seconds": 2.2, "problem": None},
            }
            if ready
            else None
        ),
        "crash": crash,
        "ended": None if running else iso(at + dt.timedelta(minutes=minutes)),
        "port": 30000,
        "rank": 0,
        "nodes": 1,
        "log": f"/root/deployctl-logs/eagle3_{tag}.log",
        "benches": list(benches),
    }


def dossier(name, gpu, releases, attempts, current):
    return {
        "status": "ok",
        "host": name,
        "package": "sglang",
        "version": "0.5.12",
        "release": current,
        "gpus": [{"name": gpu[0], "memory_total_mib": gpu[1]}] * 8,
        "releases": releases,
        "attempts": attempts,
        "problems": [],
        "push_in_progress": None,
    }


def story():
    """{host: dossier} of a week: baseline, EAGLE, three patches that die under load, a fourth that holds."""
    b200, h200 = ("NVIDIA B200", 183359), ("NVIDIA H200", 143771)

    def at(days, hours, minutes=0):
        return START + dt.timedelta(days=days, hours=hours, minutes=minutes)

    def measured(number, tag, kind, when, gpu, **more):
        return [bench(1, number, tag, kind, when + dt.timedelta(minutes=12), [gpu[0]] * 8, **more)]

    plan = []  # (tag, when, keywords)
    plan.append(("t0_base", at(0, 0), {"kind": "base", "minutes": 48, "measure": "base"}))
    plan.append(("t1_eagle", at(0, 1), {"minutes": 55, "measure": "eagle"}))
    plan.append(("t1_eagle_48", at(0, 2, 10), {"minutes": 35}))
    plan.append(("t2_v1", at(0, 3), {"version": 1, "state": "crashed", "minutes": 11}))
    plan.append(("t2_v1_burst4", at(0, 3, 30), {"version": 1, "state": "crashed", "minutes": 10}))
    plan.append(("t2_v1_nograph", at(0, 4, 5), {"version": 1, "state": "crashed", "minutes": 12}))
    plan.append(("t3_v2", at(0, 6), {"version": 2, "state": "crashed", "minutes": 10}))
    plan.append(("t3_v2_page1", at(0, 6, 40), {"version": 2, "state": "crashed", "minutes": 10}))
    plan.append(
        ("t3_mem", at(0, 7, 30), {"version": 2, "state": "crashed", "ready": None, "minutes": 6, "memory": True})
    )
    plan.append(("t3_mem", at(0, 8), {"version": 2, "state": "crashed", "minutes": 10}))
    plan.append(("t4_eagle_again", at(1, 0), {"minutes": 62}))
    plan.append(("t5_v3", at(1, 2), {"version": 3, "state": "crashed", "minutes": 14}))
    plan.append(("t5_v3_topk1", at(1, 2, 40), {"version": 3, "state": "stopped", "minutes": 22, "wrong": True}))
    plan.append(("t5_v3_sync", at(1, 3, 30), {"version": 3, "state": "crashed", "minutes": 13}))
    plan.append(("t5_v3_early", at(1, 4, 30), {"version": 3, "state": "stopped", "ready": None, "minutes": 4}))
    plan.append(("t5_v3_clean", at(1, 5, 20), {"version": 3, "state": "crashed", "minutes": 12}))
    plan.append(("t6_base", at(2, 0), {"kind": "base", "minutes": 40}))
    plan.append(("t7_v4", at(2, 2), {"version": 4, "minutes": 30}))
    plan.append(("t7_v4_th4", at(2, 3, 5), {"version": 4, "minutes": 66}))
    plan.append(("t8_v4", at(2, 5), {"version": 4, "minutes": 90, "measure": "v4"}))
    plan.append(("t9_v4_agentic", at(2, 7), {"version": 4, "minutes": 50}))
    plan.append(("t9_v4_long", at(3, 0), {"version": 4, "state": "ready"}))
    numbers = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4}

    def made(host, gpu, plan, numbers):
        attempts = []
        for number, (tag, when, given) in enumerate(plan, 1):
            more = dict(given)
            version = more.get("version", 0)
            log = f"/root/deployctl-logs/eagle3_{tag}.log"
            kind = more.pop("measure", None)
            if more.pop("memory", False):
                more["crash"] = out_of_memory(log)
            elif more.get("state") == "crashed":
                more["crash"] = crash(version, log)
            if more.pop("wrong", False):
                more["smoke"] = {
                    "ok": False,
                    "text": "!!!!!!!!!!!!!!!!",
                    "problem": 'the answer repeats one token, "!": "!!!!!!!!!!!!!!!!"',
                    "seconds": 0.5,
                    "burst": None,
                }
            benches = measured(number, tag, kind, when, gpu) if kind else []
            if kind and tag in ("t0_base", "t8_v4"):
                benches.append(
                    bench(
                        2,
                        number,
                        tag,
                        kind,
                        when + dt.timedelta(minutes=30),
                        [gpu[0]] * 8,
                        prompts="agentic",
                        levels=LEVELS[:5],
                    )
                )
            if tag == "t1_eagle":
                benches = [bench(1, number, tag, "eagle", when, [gpu[0]] * 8)]
            attempts.append(
                attempt(number, tag, when, release_number=numbers[version], benches=benches, host=host, **more)
            )
        return attempts

    first = made("gpu-a", b200, plan, numbers)
    releases = [
        release(0, 0, at(0, 2, 50)),
        release(1, 1, at(0, 2, 55)),
        release(2, 2, at(0, 5, 50), 1, 1),
        release(3, 3, at(1, 1, 50), 2, 2),
        release(4, 4, at(2, 1, 50), 3, 3, current=True),
    ]
    other = [
        ("h0_base", at(1, 1), {"kind": "base", "minutes": 50, "measure": "base", "ready": 402.0}),
        ("h1_eagle", at(1, 2, 20), {"minutes": 45, "measure": "eagle", "ready": 420.0}),
        ("h2_v3", at(1, 6), {"version": 3, "state": "crashed", "minutes": 9, "ready": 421.0}),
        ("h2_v3_b", at(1, 6, 40), {"version": 3, "state": "crashed", "minutes": 9, "ready": 418.0}),
        ("h3_v4", at(2, 6), {"version": 4, "minutes": 40, "ready": 415.0}),
        ("h3_v4_th8", at(2, 7), {"version": 4, "minutes": 30, "ready": 425.0}),
        ("h4_mem", at(2, 8), {"version": 4, "state": "crashed", "ready": None, "minutes": 5, "memory": True}),
        ("h5_v4", at(3, 0, 20), {"version": 4, "minutes": 70, "ready": 411.0}),
        ("h6_v4", at(3, 2), {"version": 4, "state": "loading", "ready": None}),
    ]
    second = made("gpu-b", h200, other, {0: 0, 3: 1, 4: 2})
    return {
        "gpu-a": dossier("gpu-a", b200, releases, first, 4),
        "gpu-b": dossier(
            "gpu-b",
            h200,
            [release(0, 0, at(1, 5)), release(1, 3, at(1, 5, 50)), release(2, 4, at(2, 5, 50), 1, 3, current=True)],
            second,
            2,
        ),
    }


def season(weeks):
    """The same week of the first host again and again, each with patches, releases and attempts of its own."""
    told = story()
    host = told["gpu-a"]
    attempts, releases = host["attempts"], host["releases"][1:]
    for week in range(1, weeks):
        for one in attempts[:22]:
            later = copy.deepcopy(one)
            later["attempt"] += 22 * week
            later["log_tag"] += f"_{week}"
            for key in ("at", "ended"):
                if later[key]:
                    later[key] = iso(dt.datetime.fromisoformat(later[key]) + dt.timedelta(days=7 * week))
            if later["release"]:
                later["release"] += 4 * week
                later["patches"] = [f"{later['patches'][0]}.{week}"]
            host["attempts"] = [*host["attempts"], later]
        for one in releases:
            patches = [f"{one['patches'][0]}.{week}"]
            host["releases"].append({**one, "number": one["number"] + 4 * week, "current": False, "patches": patches})
    return told


STORY_AT = START + dt.timedelta(days=3, hours=3)
