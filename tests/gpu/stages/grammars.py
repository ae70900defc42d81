"""Requests under a grammar. Part of the stage `features`; runs where a grammar library can be imported."""

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any

from tests.gpu import arms, verdicts
from tests.gpu.load import Client, prompt
from tests.gpu.servers import Fleet, Server
from tests.gpu.session import Session

from . import on_server
from .crowd import crowd

NEEDS = ("b-base-no-overlap-grammar", "b-v1-dynamic-grammar", "b-v2-dynamic-grammar")
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "city": {"enum": ["Paris", "Rome"]},
            "people": {"type": "integer", "minimum": 0, "maximum": 99999},
        },
        "required": ["city", "people"],
        "additionalProperties": False,
    }
)
REGEX = r"(red|green|blue)-[0-9]{4}"


async def with_grammars(client: Client, _server: Server) -> dict[str, Any]:
    """Constrained requests while off, and across both switches."""
    asks = [("json_schema", SCHEMA)] * 3 + [("regex", REGEX)] * 3

    async def one(number: int, kind: str, grammar: str) -> str:
        sampling = {kind: grammar, "ignore_eos": False}
        return (await client.generate(prompt(820 + number), 80, sampling))["text"]

    async def all_of_them() -> list[str]:
        return list(await asyncio.gather(*[one(number, kind, text) for number, (kind, text) in enumerate(asks)]))

    few = await all_of_them()
    async with crowd(client):
        many = await all_of_them()
    starting = asyncio.create_task(all_of_them())
    await asyncio.sleep(0.03)
    async with crowd(client, width=12):
        crossing_over = await starting
    return {"kinds": [kind for kind, _ in asks], "on": few, "off": many, "crossing": crossing_over}


def follows(kind: str, text: str) -> bool:
    """Whether a text is what its grammar allows."""
    if kind == "regex":
        return re.fullmatch(REGEX, text.strip()) is not None
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and set(value) == {"city", "people"} and value["city"] in ("Paris", "Rome")


def run(session: Session, fleet: Fleet) -> None:
    """The same requests of the plain server and of both workers."""
    backend = arms.grammar_backend()
    if backend is None:
        session.skip("grammars", "neither xgrammar nor llguidance can be imported")
        return
    taken = {key: on_server(session, fleet, key, f"grammars ({backend})", with_grammars) for key in NEEDS}
    for key in NEEDS:
        found = taken[key]
        session.record("features", f"{key} ({backend})", found)
        for state in ("on", "off", "crossing"):
            texts: Sequence[str] = found[state] if found else []
            right = sum(
                1 for kind, text in zip(found["kinds"] if found else [], texts, strict=True) if follows(kind, text)
            )
            session.verdicts(
                [
                    verdicts.judge(
                        "features",
                        f"{key}: follows its grammar, {state}, of {len(texts)}",
                        right if found else None,
                        holds=right == len(texts) if found else None,
                    )
                ]
            )
