"""Loads as they come: a ramp, a load that hovers around the threshold, and a soak with aborts; not one wrong token."""

import asyncio
import random
import time
import uuid
from typing import Any

from tests.gpu import arms, decode_log, verdicts
from tests.gpu.load import Client, ClosedLoop, prompt
from tests.gpu.servers import Fleet, Server
from tests.gpu.session import Session

from . import on_server, speed

NEEDS = (speed.REFERENCE, "a-v1-dynamic", "a-v2-dynamic")
DYNAMIC = NEEDS[1:]
LONG_PROMPT, LONG_TOKENS, REHEARSAL_LONG_TOKENS = 500, 2600, 200
RAMP = ((1, 1.0), (10, 2.0), (32, 2.5), (64, 2.5), (1, 2.5))
FLAP = ((arms.THRESHOLD - 1, 0.5), (arms.THRESHOLD + 2, 0.5)) * 6 + ((1, 2.0),)
SOAK_S, QUICK_SOAK_S = 20.0, 8.0
SOAK_WIDTHS = (1, 2, 5, 7, 8, 9, 10, 12, 20, 33, 64)
_ABORTED, _WITH_LOGPROBS = 0.12, 0.04
_RAMP_TOKENS, _FLAP_TOKENS = 200, 120


def run(session: Session, fleet: Fleet) -> None:
    """For both workers."""
    expected = _expected(session, fleet)
    if expected is None:
        session.skip("life", "what should be written is not known")
        return
    outputs, long_output = expected
    for key in DYNAMIC:
        server = fleet.get(key)
        mark = server.log.mark() if server else 0
        parts = {
            "ramp": lambda c, s: phases(c, s, RAMP, outputs, _RAMP_TOKENS, long_output),
            "flap": lambda c, s: phases(c, s, FLAP, outputs, _FLAP_TOKENS, None),
            "soak": lambda c, s: soak(c, s, QUICK_SOAK_S if session.options.quick else SOAK_S, outputs),
        }
        for name, part in parts.items():
            found = on_server(session, fleet, key, name, part, need_s=15.0 if name == "flap" else 25.0)
            if found is not None:
                session.record("life", f"{key} {name}", found)
                session.say(key, name, {k: v for k, v in found.items() if k != "phases"})
            session.verdicts(_verdicts(key, name, found, speculates=not session.options.rehearse))
        if server:
            text = server.log.since(mark)
            leaks = decode_log.leak_lines(text)
            session.verdicts(
                [
                    verdicts.judge("life", f"{key}: lives", server.alive(), holds=server.alive()),
                    verdicts.judge(
                        "life", f"{key}: lines that tell of a leak", len(leaks), holds=not leaks, wanted="= 0"
                    ),
                    *speed.while_off("life", key, text),
                ]
            )


def _expected(session: Session, fleet: Fleet) -> tuple[list[list[int]], list[int]] | None:
    """What the reference writes after prompts 0 to 63, and after the long one."""
    known = session.outputs.get(("speed", speed.REFERENCE), {}).get(arms.MAX_RUNNING)
    tokens = speed.tokens_of(session)
    long_tokens = REHEARSAL_LONG_TOKENS if session.options.rehearse else LONG_TOKENS

    async def ask(client: Client, _server: Server) -> tuple[list[list[int]], list[int]]:
        long_request = asyncio.create_task(client.ids(LONG_PROMPT, long_tokens))
        outputs = known or await client.batch(range(arms.MAX_RUNNING), tokens)
        return outputs, await long_request

    return on_server(session, fleet, speed.REFERENCE, "what should be written", ask, need_s=15.0)


def _verdicts(key: str, name: str, found: dict[str, Any] | None, *, speculates: bool) -> list[verdicts.Verdict]:
    if found is None:
        return [verdicts.judge("life", f"{key} {name}: wrong outputs", None, holds=None)]
    made = [
        verdicts.judge(
            "life",
            f"{key} {name}: wrong outputs, of {found['requests']}",
            found["wrong"],
            holds=found["wrong"] == 0 and found["requests"] > 0,
            wanted="= 0",
        ),
        verdicts.judge("life", f"{key} {name}: failed requests", found["failures"], holds=not found["failures"]),
    ]
    if speculates:
        switches = found["switches"]
        made.append(verdicts.judge("life", f"{key} {name}: switches", switches, holds=switches >= 2, wanted=">= 2"))
    if "long_request_right" in found:
        made.append(
            verdicts.judge(
                "life",
                f"{key} {name}: the request that lived through it",
                found["long_request_right"],
                holds=found["long_request_right"],
            )
        )
    if "answers_after" in found:
        made.append(
            verdicts.judge(
                "life",
                f"{key} {name}: answers rightly afterwards",
                found["answers_after"],
                holds=found["answers_after"],
            )
        )
    return made


async def phases(
    client: Client, server: Server, plan: Any, outputs: list[list[int]], tokens: int, long_output: list[int] | None
) -> dict[str, Any]:
    """A closed loop whose width follows a plan of (width, seconds); one long request may live through all of it."""
    done, wrong = 0, []
    tokens = min(tokens, len(outputs[0]))

    async def one(worker: int, rounds: int) -> None:
        nonlocal done
        number = (worker + rounds) % len(outputs)
        written = await client.ids(number, tokens)
        done += 1
        if written != outputs[number][:tokens]:
            wrong.append([number, verdicts.first_difference(written, outputs[number][:tokens])])

    began, rows = server.log.mark(), []
    async with ClosedLoop(one) as loop:
        long_request = asyncio.create_task(client.ids(LONG_PROMPT, len(long_output))) if long_output else None
        for width, seconds in plan:
            alive = long_request is not None and not long_request.done()
            loop.width = width - 1 if alive else width
            mark = server.log.mark()
            await asyncio.sleep(seconds)
            rows.append({"width": width, **decode_log.summary(decode_log.steps(server.log.since(mark)), width)})
            if loop.broken:
                break
        loop.width = 0
    found = {"requests": done, "wrong": len(wrong), "first_wrong": wrong[:5], "failures": loop.failures[:5]}
    if long_request is not None and long_output:
        found["long_request_right"] = await long_request == long_output
    found["switches"] = len(decode_log.switches(server.log.since(began)))
    found["phases"] = rows
    return found


async def soak(client: Client, server: Server, seconds: float, outputs: list[list[int]]) -> dict[str, Any]:
    """Random widths and lengths, clients that go away, requests for logprobs; then one request more."""
    dice, counted = random.Random(7), {"requests": 0, "aborted": 0, "with_logprobs": 0}
    wrong: list[Any] = []
    most = len(outputs[0])
    own = [random.Random(worker) for worker in range(arms.MAX_RUNNING)]

    async def one(worker: int, _rounds: int) -> None:
        mine = own[worker]
        number, tokens, chance = mine.randrange(len(outputs)), mine.randrange(2, max(3, min(200, most))), mine.random()
        if chance < _ABORTED:
            rid = f"soak-{uuid.uuid4().hex}"
            try:
                await asyncio.wait_for(client.generate(prompt(number), most, rid=rid), mine.uniform(0.05, 0.6))
            except TimeoutError:
                counted["aborted"] += 1
                if mine.random() < 0.5:  # of the others the server learns from the closed connection
                    await client.abort(rid)
            return
        logprobs = chance > 1 - _WITH_LOGPROBS
        more = {"return_logprob": True, "top_logprobs_num": 2} if logprobs else {}
        written = (await client.generate(prompt(number), tokens, **more))["output_ids"]
        counted["requests"] += 1
        counted["with_logprobs"] += logprobs
        if written != outputs[number][:tokens]:
            wrong.append([number, tokens, logprobs])

    began, mark = time.monotonic(), server.log.mark()
    async with ClosedLoop(one) as loop:
        while time.monotonic() - began < seconds and not loop.broken:
            loop.width = dice.choice(SOAK_WIDTHS)
            await asyncio.sleep(dice.uniform(0.15, 1.2))
        loop.width = 0
    after = await client.ids(1, most)
    text = server.log.since(mark)
    return {
        **counted,
        "wrong": len(wrong),
        "first_wrong": wrong[:5],
        "failures": loop.failures[:5],
        "answers_after": after == outputs[1],
        "switches": len(decode_log.switches(text)),
        "without_cuda_graph": sum(1 for step in decode_log.steps(text) if not step.cuda_graph),
    }
