"""Where a decode step's time goes while speculation is off: the profiler's trace, beside the same of a plain server."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

from tests.gpu import trace, verdicts
from tests.gpu.load import Client
from tests.gpu.servers import Fleet, Server
from tests.gpu.session import Session

from . import on_server

NEEDS = ("a-v2-dynamic", "a-base", "a-v1-dynamic", "a-base-no-overlap")
REQUESTS, STEPS = 32, 6
_TOKENS, _SETTLE_S, _WRITTEN_S = 600, 0.9, 30.0
_LARGEST_TRACE_BYTES = 15_000_000


async def record(client: Client, _server: Server, folder: Path) -> list[Path]:
    """The traces of a few decode steps under load."""
    requests = [asyncio.create_task(client.ids(number, _TOKENS)) for number in range(REQUESTS)]
    await asyncio.sleep(_SETTLE_S)
    body = {"output_dir": str(folder), "num_steps": STEPS, "activities": ["CPU", "GPU"], "with_stack": False}
    status = await client.post("/start_profile", body)
    await asyncio.gather(*requests)
    if status != 200:
        raise RuntimeError(f"/start_profile answered HTTP {status}")
    return await _written(folder)


def _sizes(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in folder.rglob("*.json.gz")}


async def _written(folder: Path) -> list[Path]:
    """The trace files, once they no longer grow."""
    sizes: dict[Path, int] = {}
    for _ in range(int(_WRITTEN_S)):
        await asyncio.sleep(1.0)
        now = _sizes(folder)
        if now and now == sizes:
            return sorted(now)
        sizes = now
    raise TimeoutError(f"no trace in {folder} after {_WRITTEN_S:g} s")


def run(session: Session, fleet: Fleet) -> None:
    """One trace an arm, kept, with its numbers."""
    for key in NEEDS[: 2 if session.options.quick else None]:
        folder = session.work / "traces" / key
        folder.mkdir(parents=True, exist_ok=True)
        paths = on_server(session, fleet, key, "profile", lambda c, s, folder=folder: record(c, s, folder), need_s=15.0)
        found: dict[str, Any] | None = None
        try:
            for path in paths or []:
                found = {"file": path.name, "bytes": path.stat().st_size, **trace.summary(trace.read(path), STEPS)}
                session.record("profile", key, found)
                session.say(key, found)
                if path.stat().st_size <= _LARGEST_TRACE_BYTES:
                    shutil.copy(path, session.out / f"trace-{key}.json.gz")
        except Exception as error:
            session.error(f"trace of {key}", error)
        share = found and found["gpu_idle_share"]
        session.verdicts([verdicts.reported("profile", f"{key}: share of time in which the GPU idles", share)])
