"""Requests, and loads made of them: a batch, a closed loop of changing width, one request among others."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from .arms import MAX_RUNNING, VOCABULARY
from .servers import Server

Answer = dict[str, Any]
_FIRST_PLAIN_TOKEN = 300  # below are the special tokens and the bytes
_ANSWER_S = 120.0


class Refused(RuntimeError):
    """The server answered with an error."""


def prompt(number: int, length: int = 64) -> list[int]:
    """A prompt of random tokens, the same for the same number."""
    random_tokens = random.Random(number)
    return [random_tokens.randrange(_FIRST_PLAIN_TOKEN, VOCABULARY) for _ in range(length)]


class Client:
    """Speaks to one server.

    Args:
        url: Of the server.
        http: An open aiohttp session.
        vocabulary: Tokens above are folded into it.
    """

    def __init__(self, url: str, http: Any, vocabulary: int) -> None:
        self._url, self._http, self._vocabulary = url, http, vocabulary

    async def generate(
        self, ids: Sequence[int], tokens: int, sampling: dict[str, Any] | None = None, **more: Any
    ) -> Answer:
        """One generation, greedy and of exactly so many tokens unless `sampling` says otherwise.

        Raises:
            Refused: The server answered with an error.
        """
        parameters = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, **(sampling or {})}
        folded = [number % self._vocabulary for number in ids]
        body = {"input_ids": folded, "sampling_params": parameters, **more}
        async with self._http.post(self._url + "/generate", json=body) as response:
            answer = await response.json()
            if response.status != 200:
                raise Refused(f"{response.status} {str(answer)[:300]}")
            return answer

    async def ids(self, number: int, tokens: int, length: int = 64) -> list[int]:
        """What it writes greedily after a numbered prompt."""
        return (await self.generate(prompt(number, length), tokens))["output_ids"]

    async def batch(self, numbers: Sequence[int], tokens: int, length: int = 64) -> list[list[int]]:
        """What it writes after several prompts sent at once."""
        return list(await asyncio.gather(*[self.ids(number, tokens, length) for number in numbers]))

    async def abort(self, rid: str) -> None:
        """Tell the server to end a request. (Of a client that goes away it learns up to 4 s later.)"""
        await self.post("/abort_request", {"rid": rid})

    async def post(self, path: str, body: dict[str, Any]) -> int:
        """Another request: its HTTP status."""
        async with self._http.post(self._url + path, json=body) as response:
            await response.read()
            return response.status


@contextlib.asynccontextmanager
async def connected(server: Server) -> AsyncIterator[Client]:
    """A client of a server."""
    import aiohttp  # the engine has it; what only reads results does not need it

    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, trust_env=False) as http:
        yield Client(server.url, http, server.vocabulary)


class ClosedLoop:
    """Workers of which the first `width` each send one request after another.

    Args:
        one: Sends one request: one(worker, round). What it raises ends the loop and is kept.
        most: So many workers.
    """

    def __init__(self, one: Callable[[int, int], Awaitable[None]], most: int = MAX_RUNNING) -> None:
        self._one, self._most = one, most
        self.width = 0
        self.failures: list[str] = []
        self._ended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "ClosedLoop":
        self._tasks = [asyncio.create_task(self._work(number)) for number in range(self._most)]
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        self._ended.set()
        if kind is not None:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def broken(self) -> bool:
        """Whether a request failed."""
        return bool(self.failures)

    async def _work(self, worker: int) -> None:
        rounds = 0
        while not self._ended.is_set():
            if worker >= self.width:
                await asyncio.sleep(0.01)
                continue
            try:
                await self._one(worker, rounds)
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}"[:300])
                self._ended.set()
            rounds += 1


async def timed(awaitable: Awaitable[Any]) -> tuple[Any, float]:
    """(result, seconds)."""
    began = time.perf_counter()
    result = await awaitable
    return result, time.perf_counter() - began
