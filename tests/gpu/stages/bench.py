"""deployctl's own measurement: two arms by the engine's load generator, laid side by side."""

from typing import Any

from tests.gpu import verdicts
from tests.gpu.servers import Fleet
from tests.gpu.session import Session

NEEDS = ("b-base-no-overlap", "b-v1-dynamic")
SWEEP, TOKENS, REQUESTS = "1,16", 64, 32


def run(session: Session, fleet: Fleet) -> None:
    """`bench` on each, then `compare`; every level must be complete."""
    attempts = []
    for key in NEEDS:
        server = fleet.get(key)
        if server is None or session.clock.left_s() < 40:
            session.skip(f"bench of {key}", "no such server" if server is None else "no time left")
            continue
        words = ("bench", "--attempt", str(server.attempt), "--sweep", SWEEP, "--prompts", "coding")
        more = ("--max-tokens", str(TOKENS), "--requests-per-level", str(REQUESTS))
        with server.running():
            answer = session.ask(*words, *more, timeout_s=min(120.0, session.clock.left_s()))
        record: dict[str, Any] = answer.get("bench") or {}
        session.record("bench", key, record)
        complete = answer["exit_code"] == 0 and record.get("state") == "complete"
        well = complete and all(level["completed"] == level["sent"] == REQUESTS for level in record["levels"])
        what = f"{key}: deployctl bench {SWEEP}, every request of every level answered"
        session.verdicts([verdicts.judge("bench", what, answer.get("status"), holds=well)])
        if complete:
            attempts.append(str(server.attempt))
    if len(attempts) == len(NEEDS):
        session.deployctl("compare", *attempts, timeout_s=60)
