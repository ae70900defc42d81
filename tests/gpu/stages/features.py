"""What requests may ask for besides greedy text, with speculation off and across both switches."""

import asyncio
import itertools
import uuid
from typing import Any

from tests.gpu import decode_log, verdicts
from tests.gpu.load import Answer, Client, prompt
from tests.gpu.servers import Fleet, Server
from tests.gpu.session import Session
from tests.gpu.statistics import counts, g_test

from . import grammars, on_server
from .crowd import SETTLE_S, crowd

REFERENCE = "b-base-no-overlap"
TESTED = ("b-v1-dynamic", "b-v2-dynamic")
UNPATCHED = {"b-v1-dynamic": "b-v1", "b-v2-dynamic": "b-v2"}  # the same worker without the flag
NEEDS = (REFERENCE, *TESTED, "b-base", *UNPATCHED.values(), *grammars.NEEDS)

SMALLEST_P = 0.001
LARGEST_TIE, LARGEST_LOGPROB_DIFFERENCE = 0.05, 0.08  # bfloat16 logits of 4 to 8 come in steps of 0.031
SAMPLE_PROMPT, SAMPLE_TOKENS, SAMPLES, QUICK_SAMPLES, WAVE = 700, 4, 2400, 800, 40
SAMPLING = {"temperature": 1.0, "top_k": 8}
PENALTIES = {
    "frequency": {"frequency_penalty": 0.8},
    "presence": {"presence_penalty": 0.8},
    "repetition": {"repetition_penalty": 1.3},
}
_OFF_ACCEPT_LENGTH = 1.0
_TRIES = 6


def run(session: Session, fleet: Fleet) -> None:
    """Each feature on its own: one that fails leaves the others."""
    for part in (_sampling, _logprobs, _penalties, _stop_strings, _crossings, grammars.run):
        try:
            part(session, fleet)
        except Exception as error:
            session.error(f"features: {part.__module__}.{part.__name__}", error)


# Sampling


async def samples(client: Client, server: Server, number: int) -> dict[str, Any]:
    """Many short samples of one prompt, taken while others run."""
    found: list[tuple[int, ...]] = []
    ids = prompt(SAMPLE_PROMPT)
    async with crowd(client):
        mark = server.log.mark()
        while len(found) < number:
            answers = await asyncio.gather(*[client.generate(ids, SAMPLE_TOKENS, SAMPLING) for _ in range(WAVE)])
            found += [tuple(answer["output_ids"]) for answer in answers]
        steps = decode_log.steps(server.log.since(mark))
    lengths = [step.accept_length for step in steps if step.accept_length is not None]
    return {"samples": found, "largest_accept_length": max(lengths, default=None)}


def _sampling(session: Session, fleet: Fleet) -> None:
    number = QUICK_SAMPLES if session.options.quick else SAMPLES
    number = WAVE if session.options.rehearse else number
    taken = {
        key: on_server(session, fleet, key, "sampling", lambda c, s: samples(c, s, number), need_s=15.0)
        for key in (REFERENCE, *UNPATCHED.values(), *TESTED)
    }
    for key, found in taken.items():
        if found:
            pairs = counts([" ".join(map(str, sample[:2])) for sample in found["samples"]])
            session.record("features", f"{key} sampled tokens 1 and 2", dict(pairs.most_common()))
    views = {
        "tokens 1 and 2": lambda sample: sample[:2],
        "token 3": lambda sample: sample[2],
        "token 4": lambda sample: sample[3],
    }
    for key in TESTED:
        own = taken[key]
        length = own["largest_accept_length"] if own else None
        if not session.options.rehearse:
            what = f"{key}: largest accept length while samples were taken"
            session.verdicts([verdicts.at_most("features", what, length, _OFF_ACCEPT_LENGTH)])
        # The server that always speculates is what the patch must not change; the plain one samples with other kernels.
        for (name, view), against in itertools.product(views.items(), (UNPATCHED[key], REFERENCE)):
            base = taken[against]
            test = None
            if base and own:
                test = g_test(counts([view(x) for x in base["samples"]]), counts([view(x) for x in own["samples"]]))
                session.record(
                    "features",
                    f"{key} sampling {name} against {against}",
                    {**test._asdict(), "samples": len(own["samples"]), "accept_length": own["largest_accept_length"]},
                )
            p_value = test.p_value if test and test.degrees else None  # one cell tells nothing
            what = f"{key}: sampling while off, {name}: p of the G-test against {against}"
            shown, note = p_value and round(p_value, 5), f"{test.cells} cells" if test else ""
            if against == REFERENCE:
                session.verdicts([verdicts.reported("features", what, shown, note=note)])
                continue
            holds = None if p_value is None else p_value > SMALLEST_P
            session.verdicts(
                [verdicts.judge("features", what, shown, holds=holds, wanted=f"> {SMALLEST_P}", note=note)]
            )


# Logprobs


async def with_logprobs(client: Client, _server: Server) -> list[Answer]:
    """A few requests with their logprobs, while others run."""
    async with crowd(client):
        return list(
            await asyncio.gather(
                *[
                    client.generate(prompt(720 + number), 60, return_logprob=True, top_logprobs_num=3)
                    for number in range(_TRIES)
                ]
            )
        )


def logprob_differences(found: Answer, wanted: Answer) -> tuple[list[float], list[float]]:
    """Absolute differences up to where the texts part: (of the chosen tokens, of the tokens in both top lists)."""
    place = verdicts.first_difference(found["output_ids"], wanted["output_ids"])
    most = len(wanted["output_ids"]) if place is None else place
    own, base = found["meta_info"], wanted["meta_info"]
    chosen = [
        abs(one[0] - other[0])
        for one, other in zip(own["output_token_logprobs"][:most], base["output_token_logprobs"][:most], strict=True)
    ]
    top: list[float] = []
    for one, other in zip(own["output_top_logprobs"][:most], base["output_top_logprobs"][:most], strict=True):
        known = {entry[1]: entry[0] for entry in other or []}
        top += [abs(entry[0] - known[entry[1]]) for entry in one or [] if entry[1] in known]
    return chosen, top


def _logprobs(session: Session, fleet: Fleet) -> None:
    taken = {key: on_server(session, fleet, key, "logprobs", with_logprobs) for key in (REFERENCE, *TESTED)}
    for key in TESTED:
        chosen: list[float] = []
        top: list[float] = []
        for own, base in zip(taken[key] or [], taken[REFERENCE] or [], strict=False):
            differences = logprob_differences(own, base)
            chosen += differences[0]
            top += differences[1]
        session.record("features", f"{key} logprobs", {"tokens": len(chosen), "in_top_lists": len(top)})
        for name, values in (("logprobs", chosen), ("top logprobs", top)):
            session.verdicts(
                [
                    verdicts.at_most(
                        "features",
                        f"{key}: {name} while off, largest difference of {len(values)}",
                        max(values, default=None),
                        LARGEST_LOGPROB_DIFFERENCE,
                    )
                ]
            )


# Penalties


async def with_penalties(client: Client, _server: Server) -> dict[str, list[Answer]]:
    """Requests with each penalty, while others run; the top logprobs show ties."""
    names = [(name, number) for name in PENALTIES for number in range(_TRIES)]
    async with crowd(client):
        answers = await asyncio.gather(
            *[
                client.generate(prompt(740 + number), 200, PENALTIES[name], return_logprob=True, top_logprobs_num=5)
                for name, number in names
            ]
        )
    found: dict[str, list[Answer]] = {}
    for (name, _), answer in zip(names, answers, strict=True):
        found.setdefault(name, []).append(answer)
    return found


def part_by_a_tie(found: Answer, wanted: Answer, largest: float = LARGEST_TIE) -> bool:
    """Whether two texts are equal, or part at a token that the reference held to be as good as its own."""
    place = verdicts.first_difference(found["output_ids"], wanted["output_ids"])
    if place is None:
        return True
    if place >= min(len(found["output_ids"]), len(wanted["output_ids"])):
        return False
    top = {entry[1]: entry[0] for entry in wanted["meta_info"]["output_top_logprobs"][place]}
    own, base = top.get(found["output_ids"][place]), top.get(wanted["output_ids"][place])
    return own is not None and base is not None and abs(base - own) <= largest


def _penalties(session: Session, fleet: Fleet) -> None:
    # With the overlap scheduler a token is penalised one step late, in v2 and in the plain server alike.
    references = {"b-v1-dynamic": REFERENCE, "b-v2-dynamic": "b-base"}
    keys = (REFERENCE, "b-base", *TESTED)
    taken = {key: on_server(session, fleet, key, "penalties", with_penalties) for key in keys}
    for key, reference in references.items():
        for name in PENALTIES:
            pairs = list(zip((taken[key] or {}).get(name, []), (taken[reference] or {}).get(name, []), strict=False))
            same = sum(1 for own, base in pairs if own["output_ids"] == base["output_ids"])
            tied = sum(1 for own, base in pairs if part_by_a_tie(own, base))
            session.record(
                "features", f"{key} {name} penalty", {"requests": len(pairs), "equal": same, "or_tied": tied}
            )
            what = f"{key}: {name} penalty while off, equal to {reference} but for ties, of {len(pairs)}"
            value = tied if pairs else None
            if key == "b-v1-dynamic":
                made = verdicts.judge("features", what, value, holds=tied == len(pairs) if pairs else None)
            else:
                made = verdicts.reported("features", what, value, note="the overlap scheduler penalises a step late")
            session.verdicts([made])


# Stop strings


async def with_stop_strings(client: Client, _server: Server) -> list[dict[str, Any]]:
    """Each request is asked twice while others run: whole, and to stop at a word of what it wrote."""

    async def one(number: int) -> dict[str, Any]:
        ids = prompt(760 + number)
        whole = await client.generate(ids, 120)
        word = middle_of(whole["text"])
        cut = await client.generate(ids, 120, {"stop": [word]})
        return {"whole": whole["text"], "word": word, "text": cut["text"], "reason": cut["meta_info"]["finish_reason"]}

    async with crowd(client):
        return list(await asyncio.gather(*[one(number) for number in range(_TRIES)]))


def middle_of(text: str, length: int = 5) -> str:
    """A few characters from the middle that a JSON body and a tokenizer leave as they are.

    Raises:
        ValueError: There are none.
    """
    for start in range(len(text) // 2, len(text) - length):
        piece = text[start : start + length]
        if piece.isascii() and piece.isprintable():
            return piece
    raise ValueError(f"nothing to stop at in {text[:200]!r}")


def stopped_rightly(found: dict[str, Any]) -> bool:
    """Ended by the stop string, which is not in the text; the text is what stood before it, or parts by a tie."""
    return found["reason"].get("type") == "stop" and found["word"] not in found["text"]


def _stop_strings(session: Session, fleet: Fleet) -> None:
    for key in TESTED:
        found = on_server(session, fleet, key, "stop strings", with_stop_strings)
        session.record("features", f"{key} stop strings", found)
        right = sum(1 for one in found or [] if stopped_rightly(one))
        exact = sum(1 for one in found or [] if one["text"] == one["whole"].split(one["word"])[0])
        session.verdicts(
            [
                verdicts.judge(
                    "features",
                    f"{key}: stopped at the stop string while off, of {len(found or [])}",
                    right if found else None,
                    holds=right == len(found) if found else None,
                    note=f"{exact} with exactly the text before it",
                )
            ]
        )


# Across both switches

FEATURES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("temperature", {"temperature": 0.8, "top_p": 0.9, "top_k": 50}, {}),
    ("frequency penalty", PENALTIES["frequency"], {}),
    ("presence and repetition penalty", {**PENALTIES["presence"], **PENALTIES["repetition"]}, {}),
    ("logprobs", {}, {"return_logprob": True, "top_logprobs_num": 2}),
    ("greedy", {}, {}),
)


async def crossing(client: Client, server: Server, tokens: int, gone: int) -> dict[str, Any]:
    """One request of each feature starts among few (on); many come (off); they leave (on); it ends.

    Besides, the first of `gone` requests is aborted and the last one's client goes away while speculation is off.
    """
    mark = server.log.mark()

    async def one(number: int, sampling: dict[str, Any], more: dict[str, Any]) -> bool:
        answer = await client.generate(prompt(780 + number), tokens, sampling, **more)
        lists = answer["meta_info"].get("output_token_logprobs") if more else None
        whole = len(answer["output_ids"]) == tokens == answer["meta_info"]["completion_tokens"]
        return whole and (lists is None or len(lists) == tokens)

    rids = [f"leaving-{uuid.uuid4().hex}" for _ in range(gone)]
    leaving = [asyncio.create_task(client.generate(prompt(790), tokens, rid=rid)) for rid in rids]
    asked = [asyncio.create_task(one(number, sampling, more)) for number, (_, sampling, more) in enumerate(FEATURES)]
    await asyncio.sleep(SETTLE_S)
    async with crowd(client):
        await client.abort(rids[0])
        leaving[-1].cancel()
        await asyncio.sleep(SETTLE_S)
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    await asyncio.gather(*leaving, return_exceptions=True)
    return {
        "whole": {name: str(outcome) for (name, _, _), outcome in zip(FEATURES, outcomes, strict=True)},
        "switches": decode_log.switches(server.log.since(mark)),
        "answers_after": len(await client.ids(1, 20)) == 20,
    }


def _crossings(session: Session, fleet: Fleet) -> None:
    tokens = 60 if session.options.rehearse else 1500
    for key in TESTED:
        found = on_server(
            session, fleet, key, "across both switches", lambda c, s: crossing(c, s, tokens, 2), need_s=15.0
        )
        session.record("features", f"{key} across both switches", found)
        broken = [name for name, outcome in found["whole"].items() if outcome != "True"] if found else None
        both = {"ON", "OFF"} <= set(found["switches"]) if found else None
        if not session.options.rehearse:
            session.verdicts(
                [verdicts.judge("features", f"{key}: went off and on again", found and found["switches"], holds=both)]
            )
        session.verdicts(
            [
                verdicts.judge(
                    "features",
                    f"{key}: requests across both switches that are not whole",
                    broken,
                    holds=None if found is None else not broken,
                ),
                verdicts.judge(
                    "features",
                    f"{key}: answers after aborts",
                    found and found["answers_after"],
                    holds=found and found["answers_after"],
                ),
            ]
        )
