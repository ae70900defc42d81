"""Others that run beside the tested requests, so that speculation is off."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator

from tests.gpu.load import Client, ClosedLoop, prompt

WIDTH, FIRST_PROMPT = 16, 800
SETTLE_S = 0.5


@contextlib.asynccontextmanager
async def crowd(client: Client, width: int = WIDTH) -> AsyncIterator[None]:
    """So many other requests run for the length of a block: speculation is off. At its end they are aborted."""
    running: set[str] = set()

    async def one(worker: int, rounds: int) -> None:
        rid = f"crowd-{uuid.uuid4().hex}"
        running.add(rid)
        try:
            # Of different lengths, so that they do not end together.
            tokens = 300 + 61 * ((worker + rounds) % WIDTH)
            await client.generate(prompt(FIRST_PROMPT + worker), tokens, rid=rid)
        finally:
            running.discard(rid)

    async with ClosedLoop(one, most=width) as loop:
        loop.width = width
        await asyncio.sleep(SETTLE_S)
        yield
        failures = list(loop.failures)
        loop.width = 0
        await asyncio.gather(*[client.abort(rid) for rid in list(running)])
    if failures:
        raise RuntimeError(f"a request beside the tested ones failed: {failures[0]}")
