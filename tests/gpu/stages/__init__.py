"""What is measured. A stage is a function of (session, fleet); whatever fails in one of its parts leaves the others."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tests.gpu.load import Client, connected
from tests.gpu.servers import Fleet, Server
from tests.gpu.session import Session

Work = Callable[[Client, Server], Awaitable[Any]]


def on_server(session: Session, fleet: Fleet, key: str, what: str, work: Work, *, need_s: float = 8.0) -> Any:
    """Do something with one server while the others stand still.

    Args:
        session, fleet: Of the run.
        key: The server's arm.
        what: For messages.
        work: Gets a client and the server.
        need_s: Not begun with less time than this.

    Returns:
        What `work` returned, or None when it was not run or failed (which is kept).
    """
    server = fleet.get(key)
    if server is None:
        session.skip(f"{what} on {key}", "no such server")
        return None
    if session.clock.left_s() < need_s:
        session.skip(f"{what} on {key}", f"{session.clock.left_s():.0f} s left, {need_s:.0f} s needed")
        return None

    async def connected_work() -> Any:
        async with connected(server) as client:
            return await work(client, server)

    try:
        with server.running():
            return asyncio.run(asyncio.wait_for(connected_work(), max(1.0, session.clock.left_s())))
    except Exception as error:
        session.error(f"{what} on {key}", error)
        fleet.look_after(server)
        return None
