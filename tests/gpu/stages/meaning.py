"""Where output and acceptance depend on the KV caches: does each arm write what the target means, before and after a switch."""

import asyncio
from typing import Any

from tests.gpu import arms, decode_log, verdicts
from tests.gpu.load import Client, prompt
from tests.gpu.servers import Fleet, Server
from tests.gpu.session import Session

from . import on_server

REFERENCE = "b-base-no-overlap"
NEEDS = (
    REFERENCE,
    "b-v1-dynamic",
    "b-v2-dynamic",
    "b-v1-dynamic-retract",
    "b-v2-dynamic-retract",
    "b-v1-dynamic-radix",
    "b-v1-dynamic-page64",
    "b-v2-dynamic-page64",
    "b-v1",
    "b-v2",
)
RESUMED = ("b-v1-dynamic", "b-v2-dynamic", "b-v1-dynamic-page64", "b-v2-dynamic-page64")
REQUESTS, TOKENS = 24, 300
LARGEST_GAP = 0.05  # logits; ties in bfloat16 differ by up to 0.031 between kernels
SMALLEST_ACCEPTANCE = 0.95
LONG_PROMPT, LONG_TOKENS, OTHERS, OTHERS_FIRST, OTHERS_TOKENS = 501, 3600, 23, 600, 600
_ALONE_S = 1.0
_SHARED_PREFIX = 300


def tokens_of(session: Session) -> int:
    """How much each request writes."""
    return 24 if session.options.rehearse else TOKENS


def prompts_of(arm: arms.Arm) -> list[list[int]]:
    """The prompts of an arm's batch; the long ones share their beginning in pairs, for the radix cache."""
    made = [prompt(number, arm.prompt_tokens) for number in range(REQUESTS)]
    if arm.prompt_tokens > _SHARED_PREFIX:
        made = [made[number // 2][:_SHARED_PREFIX] + ids[_SHARED_PREFIX:] for number, ids in enumerate(made)]
    return made


async def write(client: Client, arm: arms.Arm, tokens: int) -> list[tuple[list[int], list[int]]]:
    """[(prompt, what was written)] of a batch; long prompts come in two waves, the second amid decoding of the first."""
    prompts = prompts_of(arm)

    async def one(number: int) -> list[int]:
        if arm.prompt_tokens > _SHARED_PREFIX and number % 2:
            await asyncio.sleep(0.5)
        return (await client.generate(prompts[number], tokens))["output_ids"]

    written = await asyncio.gather(*[one(number) for number in range(REQUESTS)])
    return list(zip(prompts, written, strict=True))


async def gaps(client: Client, written: list[tuple[list[int], list[int]]]) -> list[float]:
    """For every written token: how far its logit lies below the best one, given what stands before it.

    The server is asked for the prompt and the output as one prompt, so that a prefill tells, and no decode.
    """

    async def one(ids: list[int], output: list[int]) -> list[float]:
        answer = await client.generate(
            ids + output, 1, return_logprob=True, logprob_start_len=len(ids) - 1, top_logprobs_num=1
        )
        given, best = answer["meta_info"]["input_token_logprobs"], answer["meta_info"]["input_top_logprobs"]
        pairs = [
            (one_best, one_given)
            for one_best, one_given in zip(best, given, strict=True)
            if one_best and one_given[0] is not None
        ]
        return [one_best[0][0] - one_given[0] for one_best, one_given in pairs]

    found: list[float] = []
    for ids, output in written:  # in turn: sixteen long prefills with logprobs at once would need much memory
        found += await one(ids, output)
    return found


async def alone(client: Client, server: Server, tokens: int) -> tuple[list[decode_log.Step], list[int]]:
    """The long request with nobody beside it: its decode steps, and what it wrote."""
    mark = server.log.mark()
    output = await client.ids(LONG_PROMPT, tokens)
    return decode_log.steps(server.log.since(mark)), output


async def interrupted(client: Client, server: Server, tokens: int) -> dict[str, Any]:
    """The long request alone, then with others (speculation off), then alone again, and once more alone throughout.

    Acceptance depends on the text: where both outputs are the same, the lines after the off phase stand beside those of
    the undisturbed request at the same length.
    """
    undisturbed, text = await alone(client, server, tokens)
    mark = server.log.mark()
    long_request = asyncio.create_task(client.ids(LONG_PROMPT, tokens))
    await asyncio.sleep(_ALONE_S)
    off_from = server.log.mark()
    others = await client.batch(range(OTHERS_FIRST, OTHERS_FIRST + OTHERS), min(OTHERS_TOKENS, tokens // 4))
    off_until = server.log.mark()
    output = await long_request
    before = _on(decode_log.steps(server.log.since(mark, off_from)))
    off = [step for step in decode_log.steps(server.log.since(off_from, off_until)) if step.running > arms.THRESHOLD]
    after = _on(decode_log.steps(server.log.since(off_until)))[1:]  # the first line straddles the switch
    same_place = [step for step in _on(undisturbed) if after and step.tokens >= after[0].tokens]
    return {
        "output": output,
        "others": len(others),
        "before": _acceptance(before),
        "off": _acceptance(off),
        "after": _acceptance(after),
        "undisturbed_at_same_place": _acceptance(same_place),
        "parts_from_undisturbed_at": verdicts.first_difference(output, text),
        "lines": {"before": len(before), "off": len(off), "after": len(after), "undisturbed": len(same_place)},
        "without_cuda_graph_while_off": sum(1 for step in off if not step.cuda_graph),
    }


def _on(found: list[decode_log.Step]) -> list[decode_log.Step]:
    return [step for step in found if step.running == 1]


def _acceptance(found: list[decode_log.Step]) -> float | None:
    value = decode_log.mean([step.accept_length for step in found if step.accept_length is not None])
    return None if value is None else round(value, 3)


def run(session: Session, fleet: Fleet) -> None:
    """Batches while off, the request that lives through a switch, and everything scored by the reference."""
    written: dict[str, list[tuple[list[int], list[int]]]] = {}
    tokens = tokens_of(session)
    for key in NEEDS:
        server = fleet.get(key)
        if server is None:
            session.skip(f"meaning of {key}", "no such server")
            continue
        arm, mark = server.arm, server.log.mark()
        found = on_server(session, fleet, key, "batch", lambda c, _s, arm=arm: write(c, arm, tokens))
        if found is None:
            continue
        written[key] = found
        text = server.log.since(mark)
        kept = {"retracted": decode_log.retractions(text), "log": decode_log.summary(decode_log.steps(text), REQUESTS)}
        session.record("meaning", key, kept)
        if key.endswith("-retract") and not session.options.rehearse:
            count = decode_log.retractions(text)
            session.verdicts(
                [
                    verdicts.judge(
                        "meaning", f"{key}: requests taken out of the batch", count, holds=count > 0, wanted="> 0"
                    )
                ]
            )
        if key in RESUMED:
            _resume(session, fleet, key, written)
    _score(session, fleet, written)
    health = fleet.check()
    session.record("meaning", "servers", health)
    leaks = [name for name, state in health.items() if state["leaks"] or not state["alive"]]
    session.verdicts([verdicts.judge("meaning", "servers that are dead or tell of a leak", leaks, holds=not leaks)])


def _resume(session: Session, fleet: Fleet, key: str, written: dict[str, list[tuple[list[int], list[int]]]]) -> None:
    tokens = 120 if session.options.rehearse else LONG_TOKENS
    found = on_server(session, fleet, key, "off and on again", lambda c, s: interrupted(c, s, tokens), need_s=25.0)
    if found is not None:
        written[f"{key} off and on again"] = [(prompt(LONG_PROMPT), found.pop("output"))]
        session.record("meaning", f"{key} off and on again", found)
        session.say(key, "off and on again", found)
    after = found and found["after"]
    before = found and found["before"]
    value = after / before if after and before else None
    made = [verdicts.at_least("meaning", f"{key}: acceptance after an off phase / before", value, SMALLEST_ACCEPTANCE)]
    undisturbed = found and found["undisturbed_at_same_place"]
    if after and undisturbed and found["parts_from_undisturbed_at"] is None:
        what = f"{key}: acceptance after an off phase / undisturbed at the same place"
        made.append(verdicts.at_least("meaning", what, after / undisturbed, SMALLEST_ACCEPTANCE))
    if not session.options.rehearse:
        session.verdicts(made)


def _score(session: Session, fleet: Fleet, written: dict[str, list[tuple[list[int], list[int]]]]) -> None:
    """Each output against the reference's own, and each token by the reference's prefill."""
    reference = written.get(REFERENCE)
    for key, pairs in written.items():
        equal = None
        if reference and [ids for ids, _ in pairs] == [ids for ids, _ in reference]:
            equal = verdicts.compared([output for _, output in pairs], [output for _, output in reference])
        found = on_server(session, fleet, REFERENCE, f"scoring {key}", lambda c, _s, pairs=pairs: gaps(c, pairs))
        largest = max(found) if found else None
        session.record(
            "meaning",
            f"{key} scored",
            {
                "tokens": len(found or []),
                "largest_gap": largest,
                "below_the_best": sum(1 for gap in found or [] if gap > 0),
                "equal_to_reference": equal,
            },
        )
        session.say(f"{key}: equal to {REFERENCE}: {equal and (equal['equal'], equal['requests'])}")
        session.verdicts([verdicts.at_most("meaning", f"{key}: largest gap to the best logit", largest, LARGEST_GAP)])
