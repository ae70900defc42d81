"""Throughput over concurrency, and whether every arm writes the same."""

import asyncio
import statistics
from typing import Any

from tests.gpu import arms, decode_log, verdicts
from tests.gpu.load import Client, prompt, timed
from tests.gpu.servers import Fleet, Server
from tests.gpu.session import Session

from . import on_server

NEEDS = ("a-base-no-overlap", "a-v1-dynamic", "a-v2-dynamic", "a-base", "a-v1", "a-v2")
REFERENCE = "a-base-no-overlap"
LEVELS, QUICK_LEVELS = (1, 4, 10, 16, 32, 64), (1, 4, 10, 32, 64)
TOKENS, REHEARSAL_TOKENS, REPEATS = 384, 16, 5
_WARM_UP_TOKENS, _WARM_UP_PROMPTS = 24, 10_000


def levels_of(session: Session) -> tuple[int, ...]:
    """The concurrencies that are measured."""
    return QUICK_LEVELS if session.options.quick else LEVELS


def tokens_of(session: Session) -> int:
    """How much each request writes."""
    return REHEARSAL_TOKENS if session.options.rehearse else TOKENS


async def measure_round(
    client: Client, server: Server, concurrency: int, tokens: int, *, warm_up: bool
) -> tuple[dict[str, Any], list[list[int]]]:
    """One concurrency once: ({throughput, acceptance lengths, decode steps of the log}, what was written)."""
    if warm_up:
        await client.batch(range(_WARM_UP_PROMPTS, _WARM_UP_PROMPTS + concurrency), _WARM_UP_TOKENS)
    mark = server.log.mark()
    requests = [client.generate(prompt(number), tokens) for number in range(concurrency)]
    answers, took_s = await timed(asyncio.gather(*requests))
    lengths = [answer["meta_info"].get("spec_accept_length") for answer in answers]
    found = {
        "tokens_per_s": sum(answer["meta_info"]["completion_tokens"] for answer in answers) / took_s,
        "accept_lengths": [length for length in lengths if length],
        "steps": decode_log.steps(server.log.since(mark)),
    }
    return found, [answer["output_ids"] for answer in answers]


def summary_of(rounds: list[dict[str, Any]], concurrency: int) -> dict[str, Any]:
    """All rounds of one arm at one concurrency."""
    speeds = [one["tokens_per_s"] for one in rounds]
    lengths = [length for one in rounds for length in one["accept_lengths"]]
    return {
        "tokens_per_s": [round(speed, 1) for speed in speeds],
        "median_tokens_per_s": round(statistics.median(speeds), 1),
        "accept_length": round(sum(lengths) / len(lengths), 3) if lengths else None,
        "log": decode_log.summary([step for one in rounds for step in one["steps"]], concurrency),
    }


def measure_concurrency(session: Session, fleet: Fleet, concurrency: int) -> None:
    """All arms at one concurrency, in turns: what slows the machine down for some seconds must not meet one arm only."""
    rounds: dict[str, list[dict[str, Any]]] = {}
    for number in range(1 if session.options.quick else REPEATS):
        for key in NEEDS:

            async def work(client: Client, server: Server, *, first: bool = number == 0) -> Any:
                return await measure_round(client, server, concurrency, tokens_of(session), warm_up=first)

            found = on_server(session, fleet, key, f"{concurrency} requests at once", work)
            if found is not None:
                rounds.setdefault(key, []).append(found[0])
                session.outputs.setdefault(("speed", key), {})[concurrency] = found[1]
    reference = session.outputs.get(("speed", REFERENCE), {}).get(concurrency)
    for key, measured in rounds.items():
        kept = session.results["stages"].get("speed", {}).get(key, {})
        kept[concurrency] = summary_of(measured, concurrency)
        if reference:
            kept[concurrency]["equal"] = verdicts.compared(session.outputs["speed", key][concurrency], reference)
        session.record("speed", key, kept)
        session.say(f"{key:18s} C={concurrency:3d} {kept[concurrency]}")


def run(session: Session, fleet: Fleet) -> None:
    """The sweeps, the ratios, and what they must be."""
    marks = {key: server.log.mark() for key, server in fleet.servers.items()}
    for concurrency in levels_of(session):
        measure_concurrency(session, fleet, concurrency)
    measured = session.results["stages"].get("speed", {})
    sweeps = {
        key.removeprefix("a-"): {level: found["tokens_per_s"] for level, found in levels.items()}
        for key, levels in measured.items()
        if key in NEEDS
    }
    session.record("speed", "ratios", verdicts.ratio_rows(sweeps, levels_of(session)))
    if not session.options.rehearse:
        session.verdicts(verdicts.speed_verdicts(sweeps))
    session.verdicts(_equality(key, measured.get(key)) for key in NEEDS)
    for key in ("a-v1-dynamic", "a-v2-dynamic"):
        server = fleet.get(key)
        text = server.log.since(marks[key]) if server and key in marks else ""
        session.verdicts(while_off("speed", key, text))


def _equality(key: str, levels: dict[int, Any] | None) -> verdicts.Verdict:
    wrong = sum(found["equal"]["requests"] - found["equal"]["equal"] for found in (levels or {}).values())
    total = sum(found["equal"]["requests"] for found in (levels or {}).values())
    return verdicts.judge(
        "speed",
        f"{key}: outputs that differ from {REFERENCE}'s, of {total}",
        wrong if total else None,
        holds=wrong == 0 if total else None,
        wanted="= 0",
    )


def while_off(stage: str, key: str, text: str) -> list[verdicts.Verdict]:
    """Above the threshold nothing is drafted, and every step runs from a CUDA graph.

    The median, because a line of the log may straddle a switch.
    """
    off = [step for step in decode_log.steps(text) if step.running > arms.THRESHOLD]
    eager = sum(1 for step in off if not step.cuda_graph)
    length = decode_log.median([step.accept_length for step in off if step.accept_length is not None])
    return [
        verdicts.judge(
            stage,
            f"{key}: decode lines without CUDA graph while off, of {len(off)}",
            eager,
            holds=eager == 0 if off else None,
            wanted="= 0",
        ),
        verdicts.judge(
            stage,
            f"{key}: median accept length above {arms.THRESHOLD} requests",
            length,
            holds=None if length is None else length == 1.0,
            wanted="= 1",
        ),
    ]
