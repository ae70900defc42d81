"""Where a decode step's time goes: the profiler's trace while speculation is off, and while it is on, each beside a
server without the flag."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

from tests.gpu import trace, verdicts
from tests.gpu.load import Client
from tests.gpu.servers import Fleet, Server
from tests.gpu.session import Session

from . import on_server

OFF, ON = 32, 4  # requests at once
TRACED = (
    ("a-v2-dynamic", OFF),
    ("a-base", OFF),
    ("a-v2-dynamic", ON),
    ("a-v2", ON),
    ("a-v1-dynamic", OFF),
    ("a-base-no-overlap", OFF),
)
NEEDS = tuple(dict.fromkeys(key for key, _ in TRACED))
STEPS = 6
_TOKENS, _SETTLE_S, _WRITTEN_S = 600, 0.9, 30.0
_LARGEST_TRACE_BYTES = 15_000_000


async def record(client: Client, _server: Server, folder: Path, width: int) -> list[Path]:
    """The traces of a few decode steps with so many requests at once."""
    requests = [asyncio.create_task(client.ids(number, _TOKENS)) for number in range(width)]
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
    for key, width in TRACED[: 2 if session.options.quick else None]:
        name = f"{key} at {width}"
        folder = session.work / "traces" / f"{key}-{width}"
        folder.mkdir(parents=True, exist_ok=True)

        async def work(client: Client, server: Server, *, where: Path = folder, at: int = width) -> list[Path]:
            return await record(client, server, where, at)

        paths = on_server(session, fleet, key, f"profile at {width}", work, need_s=15.0)
        found: dict[str, Any] | None = None
        try:
            for path in paths or []:
                found = {"file": path.name, "bytes": path.stat().st_size, **trace.summary(trace.read(path), STEPS)}
                session.record("profile", name, found)
                session.say(name, found)
                if path.stat().st_size <= _LARGEST_TRACE_BYTES:
                    shutil.copy(path, session.out / f"trace-{key}-{width}.json.gz")
        except Exception as error:
            session.error(f"trace of {name}", error)
        share = found and found["gpu_idle_share"]
        session.verdicts([verdicts.reported("profile", f"{name}: share of time in which the GPU idles", share)])
